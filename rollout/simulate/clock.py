"""Virtual time: what is due next happens next."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

Handle = Callable[..., None]


class SimulationStopped(RuntimeError):
    """The broker says that the run cannot go on, or nothing can happen any more."""


class Clock:
    """One heap of events. What is posted at an instant is delivered at it, after what was posted before."""

    def __init__(self) -> None:
        self.now = 0.0
        """The time, in seconds."""
        self.events = 0
        """The events that were delivered so far."""
        self.over = False
        """Set by a handler to end `run`."""
        self._heap: list[tuple[float, int, Handle, tuple[Any, ...]]] = []
        self._order = 0
        self._posted: deque[tuple[Handle, tuple[Any, ...]]] = deque()

    def at(self, when: float, handle: Handle, *arguments: Any) -> None:
        """Call `handle` at this time, in seconds; if it has passed, next."""
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, handle, arguments))

    def after(self, seconds: float, handle: Handle, *arguments: Any) -> None:
        self.at(self.now + seconds, handle, *arguments)

    def post(self, handle: Handle, *arguments: Any) -> None:
        """Call `handle` at this instant, after what is under way."""
        self._posted.append((handle, arguments))

    def run(self, limit_s: float, describe: Callable[[], object]) -> None:
        """Deliver until `over`. Raises SimulationStopped, with what `describe` says, when that cannot come."""
        heap = self._heap
        posted = self._posted

        while not self.over:
            while posted:
                handle, arguments = posted.popleft()
                self.events += 1
                handle(*arguments)

            if not heap:
                raise SimulationStopped(f"nothing can happen at {self.now:.1f} s: {describe()}")

            due, _, handle, arguments = heapq.heappop(heap)
            self.now = max(self.now, due)
            if due > limit_s:
                raise SimulationStopped(f"no end within {limit_s:g} s: {describe()}")

            self.events += 1
            handle(*arguments)
