"""Child processes of the supervisor: start, watch, kill, and leave nothing behind.

Every child is a session leader with its own log file. The supervisor is made a subreaper, so that
grandchildren whose parent died (an engine's workers) come back to it and are ended as well.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launch.fork_server import Copy, ForkServer
from launch.plan import ProcessSpec
from rl.config.schema import Config
from rl.wire.messages import Fatal, Heartbeat
from rl.wire.run import RunFile
from rl.wire.sockets import identity

_LAST_WORDS_S = 5.0  # the exception of a process that has ended arrives this long after its end, at most

_LIMITED_BY = {
    "generator": "generator",
    "env_server": "env",
    "parsers": "env",
    "proxy": "learner",
    "broker": "learner",
    "learner": "learner",
}


@dataclass
class Child:
    """A process of the run, and what its heartbeats said last. Times are of the monotonic clock."""

    spec: ProcessSpec
    incarnation: int
    popen: psutil.Popen | Copy
    log: Path
    started: float
    beat: Heartbeat
    """The newest, or one without progress before the first."""
    registered: bool = False
    last_beat: float = 0.0
    progressed: float = 0.0
    why_killed: str = ""
    """Set when the supervisor killed it: a hang, for instance."""
    last_words: Fatal | None = None
    """The exception that ends it."""
    heard: set[int] = field(default_factory=set)
    """Numbers of what it has said: after a connection broke it repeats its last words."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def identity(self) -> bytes:
        """Of its control socket."""
        return identity(self.spec.role, self.spec.index, self.incarnation)

    def says_more(self, since: float) -> bool:
        """It ended by an exception, whose message is on its way: a socket may be later than the kernel."""
        return self.popen.poll() == 1 and self.last_words is None and time.monotonic() < since + _LAST_WORDS_S

    def how_it_ended(self) -> tuple[str, str]:
        """In a few words, and in detail: its traceback, or the end of its log."""
        if self.last_words is not None:
            return self.last_words.message, self.last_words.detail

        code = self.popen.poll() or 0
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return self.why_killed or ended, log_tail(self.log)

    def kill(self, why: str = "") -> None:
        """Kill its whole process group, also where only the leader has ended."""
        self.why_killed = self.why_killed or why
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)


class Exits:
    """Wakes a poll when a process has ended (Linux 5.3), so that nobody has to look many times a second.

    Where the kernel does not allow it, nothing wakes, and whoever looks now and then finds out a little later.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Readable once a process has ended, until `clear`."""
        return self._epoll.fileno()

    def watch(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            self._epoll.register(os.pidfd_open(pid), select.EPOLLIN)

    def clear(self) -> None:
        for ended, _ in self._epoll.poll(0):
            self._epoll.unregister(ended)
            os.close(ended)

    def close(self) -> None:
        """Once all that are watched have ended."""
        self.clear()
        self._epoll.close()


def most_restarts(config: Config, role: str) -> int:
    """Of each process of this role."""
    limit: int = getattr(config, _LIMITED_BY[role]).max_restarts
    return limit


def spawn(spec: ProcessSpec, run: RunFile, incarnation: int, forks: ForkServer | None = None) -> Child:
    """Start one process of the plan. Call from the main thread: the child dies with the calling thread."""
    logs = run.folder / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{spec.name}.{incarnation}.log"
    environment = spec.environment | {"FRESCO_PARENT_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    environment["TMPDIR"] = str(run.socket_folder)  # what libraries drop there goes with the run

    popen: psutil.Popen | Copy | None = None
    with log.open("wb") as file, Path(os.devnull).open("rb") as nothing:
        if forks is not None and spec.imports:
            files = (nothing, file, file)
            popen = forks.begin(spec.module, spec.arguments(run, incarnation), files, environment, spec.imports)

        if popen is None:
            popen = psutil.Popen(
                spec.command(run, incarnation),
                stdin=nothing,
                stdout=file,
                stderr=file,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor only
            )

    if spec.cores:
        with contextlib.suppress(psutil.NoSuchProcess):
            popen.cpu_affinity(list(spec.cores))
    silent = Heartbeat(spec.role, spec.index, incarnation, progress=-1, busy=False)
    return Child(spec, incarnation, popen, log, time.monotonic(), silent)


def end_all(children: list[Child], patience_s: float) -> list[str]:
    """Wait for children that were told to stop, then kill what is left of each one's process group.

    Returns the names of the children that had to be killed.
    """
    _ended, late = psutil.wait_procs([child.popen for child in children], timeout=patience_s)
    for child in children:
        child.kill()
    psutil.wait_procs(late, timeout=5)
    return [child.name for child in children if child.popen in late]


def descendants() -> set[psutil.Process]:
    """Every process below this one, adopted grandchildren included."""
    return set(psutil.Process().children(recursive=True))


def end_descendants(spared: set[psutil.Process]) -> None:
    """Kill every process below this one but `spared` and what is below those."""
    kept = set(spared)
    for process in spared:
        with contextlib.suppress(psutil.NoSuchProcess):
            kept.update(process.children(recursive=True))

    begun = descendants() - kept
    for process in begun:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(begun, timeout=2)


def log_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log; empty where there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
