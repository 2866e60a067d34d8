"""How the start of an engine advances, for a supervisor that ends what stands still.

An engine that starts blocks its process, and takes seconds or many minutes: it reads, compiles, captures. What all of
that needs is the processor, or bytes of files. An engine that hangs uses neither, and its process would say that it is
alive for ever.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

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
                found[process.pid] = times.user + times.system, process.io_counters().read_chars

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
def watched_start(process: Process) -> Iterator[None]:
    """Inside, `process` is busy. As long as the calling thread or a process below this one advances, its progress
    counts below 0: a process that fails now has not worked yet. Afterwards it is as it was.
    """
    effort = Effort()
    over = threading.Event()
    process.busy = True

    def watch() -> None:
        while not over.wait(process.config.timeouts.heartbeat_s):
            if effort.advanced():
                process.progress = min(process.progress, -1) - 1  # -1 is what the supervisor begins with

    thread = threading.Thread(target=watch, name="starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        process.progress = 0
        process.busy = False
