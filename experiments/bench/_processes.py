"""CPU seconds of a command and of everything below it, by process, read from /proc while it runs."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

_EVERY_S = 0.25  # a look takes some milliseconds of a core that the command could use
_LOOK_S = 0.25
_NAMES_EVERY_S = 2.0
_YOUNG_S = 5.0
_END_S = 60.0
_TOLD = 4000  # characters of what is said last


@dataclass
class Used:
    """What was used by one process so far, or by all of one name."""

    began_s: float
    """Seconds since the command."""
    cpu_s: float = 0.0


@dataclass
class _Seen:
    """One process as it was seen last."""

    used: Used
    name: str = ""
    named_s: float = 0.0
    """When its name was read: young processes rename themselves."""


class Watched:
    """The processes of one command; what has ended keeps its last reading."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process = process
        self.output = output
        self.origin = time.time()
        self._seen: dict[psutil.Process, _Seen] = {}
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

    @property
    def used(self) -> dict[str, Used]:
        """What was used, by name; processes of one name together."""
        found: dict[str, Used] = {}
        for seen in list(self._seen.values()):
            known = found.setdefault(seen.name, Used(seen.used.began_s))
            known.began_s = min(known.began_s, seen.used.began_s)
            known.cpu_s += seen.used.cpu_s
        return found

    def until(self, there: Callable[[], bool], deadline_s: float = math.inf, every_s: float = _LOOK_S) -> None:
        """Wait for it. Raises SystemExit if the command ends before, or has had so many seconds.

        A look takes a core from what it looks at, so it is seldom where rows carry their own time.
        """
        while True:
            running = self.running
            if there():
                return
            if not running or self.elapsed_s > deadline_s:
                self.fail("it ended too soon" if not running else f"not there after {deadline_s:g} s")
            time.sleep(every_s)

    def finish(self) -> None:
        """Wait for its end. Raises SystemExit if it fails."""
        while self.running:
            time.sleep(_LOOK_S)
        if code := self.process.returncode:
            self.fail(f"it ended with {code}")

    def fail(self, why: str) -> NoReturn:
        """Raises SystemExit, with what the command has said last."""
        raise SystemExit(f"{why}:\n{self.said()}")

    def said(self) -> str:
        """The end of its output, and of each log of a run beside that."""
        return ends_of(self.output, *logs_below(self.output.parent))

    def kill_learner(self, incarnation: int) -> None:
        """Raises SystemExit where there is none."""
        for each in psutil.Process(self.process.pid).children(recursive=True):
            words = " ".join(each.cmdline()).split()  # one word where a process has taken a title
            if "-m rl.learner.process" in " ".join(words) and words[-1] == str(incarnation):
                each.kill()
                return
        self.fail(f"there is no learner of incarnation {incarnation}")

    def stop(self) -> None:
        """No more readings."""
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(_EVERY_S):
            with contextlib.suppress(psutil.Error):
                self.look()

    def look(self) -> None:
        """Read now what each has used."""
        now_s = self.elapsed_s
        for process in [self._command, *self._command.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seen = self._seen.get(process) or _Seen(Used(max(0.0, process.create_time() - self.origin)))
                seen.used.cpu_s = times.user + times.system

                if not seen.name or now_s - seen.used.began_s < _YOUNG_S or now_s - seen.named_s > _NAMES_EVERY_S:
                    seen.name = self._name(process)
                    seen.named_s = now_s
                self._seen[process] = seen

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
        if "-m" in words:
            return words[words.index("-m") + 1]
        name = process.name()[:12]
        return "starting" if "/" in name else name  # a copy that takes its title: so far only the way to its program


def logs_below(folder: Path) -> list[Path]:
    """Those of the processes of the runs in a folder."""
    return sorted(folder.glob("*/logs/*.log"))


def ends_of(*files: Path) -> str:
    """The last characters of each file that is there, below its name."""
    return "\n".join(f"{each}:\n{each.read_text(errors='replace')[-_TOLD:]}" for each in files if each.exists())


def free_of_threads() -> dict[str, str]:
    """This process's environment without what it says of OpenMP: how many threads there are is the command's matter."""
    said = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    return {name: value for name, value in os.environ.items() if name not in said}


def end_on_sigterm() -> Any:
    """SIGTERM leaves every block from now on, so that whoever ends a benchmark ends what it began.

    Returns what handled it before. Call from the main thread.
    """
    return signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextlib.contextmanager
def watched(command: Sequence[str], output: Path, environment: Mapping[str, str] | None = None) -> Iterator[Watched]:
    """Run it until the block ends; then it is interrupted, as by Ctrl-C, and has ended when this returns.

    SIGTERM ends the block as well. Where it is left by that or an error, this process says what the command said last.
    Call from the main thread.
    """
    handler = end_on_sigterm()

    with output.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment or os.environ
        )

    watch = Watched(process, output)
    try:
        yield watch

    except BaseException as why:
        if not isinstance(why, SystemExit) or isinstance(why.code, int):  # else `fail` has said it
            print(watch.said(), flush=True)
        raise

    finally:
        watch.stop()
        signal.signal(signal.SIGTERM, handler)

        if process.poll() is None:
            # In a script's background SIGINT is ignored, and so it is by what is begun there.
            is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            process.send_signal(signal.SIGTERM if is_ignored else signal.SIGINT)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
