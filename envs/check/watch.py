"""Whether the event loop answers: an environment that blocks it stops every other episode of its server.

A thread asks the loop for a sign of life. While none comes, it counts the seconds that one function computes or sleeps;
those in which the machine has no processor for it do not count. Past a deadline the function is interrupted, so that
the check goes on.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType

LOOK_S = 0.05
BLOCKED_S = 1.0  # within one function of the environment


class Blocked(RuntimeError):
    """The event loop was taken for longer than a step may take."""


class LoopWatch:
    """`with LoopWatch(deadline_s) as watch:` on the main thread, inside a running loop; `watch.found` says where."""

    def __init__(self, deadline_s: float) -> None:
        self.found = ""
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._main = threading.main_thread().ident or 0
        self._clock = time.pthread_getcpuclockid(self._main)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)

    def __enter__(self) -> LoopWatch:
        self._before = signal.signal(signal.SIGALRM, _interrupt)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGALRM, self._before)

    def _watch(self) -> None:
        while not self._over.is_set():
            alive = threading.Event()
            try:
                self._loop.call_soon_threadsafe(alive.set)
            except RuntimeError:  # the loop is closed
                return
            self._wait(alive)
            self._over.wait(LOOK_S)

    def _wait(self, alive: threading.Event) -> None:
        """Wait until the sign of life comes; counts the seconds in which one function computes or sleeps."""
        place = ""
        taken_s = computed_s = 0.0
        while not alive.wait(LOOK_S) and not self._over.is_set():
            standing = self._standing()
            now_s = time.clock_gettime(self._clock)
            taken_s = taken_s + (LOOK_S if self._sleeps() else now_s - computed_s) if standing == place else 0.0
            place = standing
            computed_s = now_s

            if place and taken_s > BLOCKED_S:
                self.found = place
            if place and taken_s > self._deadline_s:
                signal.pthread_kill(self._main, signal.SIGALRM)
                taken_s = 0.0

    def _sleeps(self) -> bool:
        """The main thread waits for something that is no processor."""
        state = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat").read_text()
        return state.rpartition(") ")[2][0] in "SD"

    def _standing(self) -> str:
        """The function in which the main thread stands; empty where it is the loop's own."""
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            name = frame.f_code.co_filename
            if "/asyncio/" not in name and not name.endswith(("selectors.py", "watch.py")):
                return frame.f_code.co_qualname
            frame = frame.f_back
        return ""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Blocked("it did not give the event loop back within the deadline of a step")
