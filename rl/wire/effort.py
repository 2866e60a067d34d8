"""How work advances that blocks its process, for a supervisor that ends what stands still.

An engine that starts, or code that is compiled, takes seconds or many minutes: it reads, computes, captures. What all
of that needs is the processor, or bytes of files. What hangs uses neither, and its process would say that it is alive
for ever.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import psutil

from rl.wire.process import Process

_LEAST_CPU_S = 0.1  # a process that only waits for another one, and looks now and then, uses less in a minute
_LEAST_BYTES = 1 << 20


class Effort:
    """The effort of the thread that made it and of the processes below this one."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._seen: dict[int, tuple[float, int]] = {}  # process (0: the thread) -> CPU seconds, bytes; last advance

    def advanced(self) -> bool:
        """Whether any of them has used the processor, or read, since the last time that this was so."""
        found = {0: (time.clock_gettime(self._clock), 0)}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error), process.oneshot():  # it may have ended
                times = process.cpu_times()
                read = process.io_counters().read_chars if hasattr(process, "io_counters") else 0  # by some kernels
                found[process.pid] = times.user + times.system, read

        grown = [
            cpu_s - self._seen[pid][0] >= _LEAST_CPU_S or read - self._seen[pid][1] >= _LEAST_BYTES
            for pid, (cpu_s, read) in found.items()
            if pid in self._seen
        ]
        advanced = any(grown) or found.keys() != self._seen.keys()
        if advanced:
            self._seen = found
        return advanced


@contextlib.contextmanager
def watched(period_s: float, advance: Callable[[], None]) -> Iterator[None]:
    """Inside, `advance` is called as long as the calling thread or a process below this one advances."""
    effort = Effort()
    over = threading.Event()

    def watch() -> None:
        while not over.wait(period_s):
            if effort.advanced():
                advance()

    thread = threading.Thread(target=watch, name="effort", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def watched_start(process: Process) -> Iterator[None]:
    """Inside, `process` is busy. What advances counts below 0: a process that fails now has not worked yet. Afterwards
    it is as it was.
    """

    def advance() -> None:
        process.progress = min(process.progress, -1) - 1  # -1 is what the supervisor begins with

    process.busy = True
    try:
        with watched(process.config.timeouts.heartbeat_s, advance):
            yield
    finally:
        process.progress = 0
        process.busy = False


@contextlib.contextmanager
def watched_work(process: Process) -> Iterator[None]:
    """Inside, what advances counts as any progress."""

    def advance() -> None:
        process.progress += 1

    with watched(process.config.timeouts.heartbeat_s, advance):
        yield
