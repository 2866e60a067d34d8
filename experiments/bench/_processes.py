"""CPU seconds of a command and of everything below it, by process, read from /proc while it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_EVERY_S = 0.05
_END_S = 60.0


@dataclass
class Used:
    """By one process so far."""

    began_s: float
    """Seconds since the command."""
    cpu_s: float = 0.0


class Watched:
    """The processes of one command; what has ended keeps its last reading."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.origin = time.time()
        self.used: dict[str, Used] = {}
        self._command = psutil.Process(process.pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watch", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def elapsed_s(self) -> float:
        return time.time() - self.origin

    @property
    def cpu_s(self) -> float:
        return sum(used.cpu_s for used in self.used.values())

    def stop(self) -> None:
        """No more readings."""
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(_EVERY_S):
            with contextlib.suppress(psutil.Error):
                self._look()

    def _look(self) -> None:
        for process in [self._command, *self._command.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                name = self._name(process)
                times = process.cpu_times()
                began = max(0.0, process.create_time() - self.origin)
                used = self.used.setdefault(name, Used(began))
                used.cpu_s = max(used.cpu_s, times.user + times.system)

    def _name(self, process: psutil.Process) -> str:
        """What it is to a reader: its role and number, or what it calls itself."""
        if process.pid == self._command.pid:
            return "the command"

        words = " ".join(process.cmdline()).split()  # one word where a process has renamed itself
        if "EngineCore" in " ".join([process.name(), *words]):
            return f"engine of {self._name(process.parent() or self._command)}"
        if "--index" in words:
            module = words[words.index("-m") + 1]
            return f"{module} {words[words.index('--index') + 1]}"
        return words[words.index("-m") + 1] if "-m" in words else process.name()[:12]


@contextlib.contextmanager
def watched(command: Sequence[str], output: Path, environment: Mapping[str, str] | None = None) -> Iterator[Watched]:
    """Run it until the block ends; then it is interrupted, as by Ctrl-C, and has ended when this returns.

    SIGTERM ends the block as well, so that whoever ends a benchmark ends what it began. Call from the main thread.
    """
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment or os.environ
        )

    watch = Watched(process)
    try:
        yield watch

    finally:
        watch.stop()
        signal.signal(signal.SIGTERM, handler)

        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
