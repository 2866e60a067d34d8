"""Time as whoever judges others by their silence may count it: without what the judge itself slept through.

A machine that was paused, or a process that was stopped, wakes to deadlines that seem to be over, though nobody could
have kept them. So each turn of the judge's loop counts for as long as it should take at most.
"""

from __future__ import annotations

import asyncio
import time


class Awake:
    """A clock that is read at every turn of a loop. It begins with the monotonic clock, and falls behind it.

    turn_s: the longest that the loop waits in one turn; one that takes more than twice as long counts as twice.
    """

    def __init__(self, now: float, turn_s: float) -> None:
        self._seen = self._counted = now
        self._longest_s = 2 * turn_s

    def read(self, now: float) -> float:
        """now: of the monotonic clock."""
        self._counted += min(now - self._seen, self._longest_s)
        self._seen = now
        return self._counted


class AwakeLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers and timeouts go by `Awake`. It wakes by itself every `turn_s`, so that it is read."""

    def __init__(self, turn_s: float) -> None:
        self._turn_s = turn_s
        self._awake = Awake(time.monotonic(), turn_s)
        super().__init__()
        self._turn()

    def time(self) -> float:
        return self._awake.read(time.monotonic())

    def _turn(self) -> None:
        self.call_later(self._turn_s, self._turn)
