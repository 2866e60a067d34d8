"""What the supervisor knows of the processes it had started: their handles, and what their heartbeats said last."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from launch.launcher.protocol import Found, Handle, Launcher, Node
from launch.plan import ProcessSpec
from rl.wire.messages import Fatal, Heartbeat
from rl.wire.run import RunFile

_LAST_WORDS_S = 5.0  # the exception of a process that has ended arrives this long after its end, at most
_KILLED_S = 5.0  # for the kernel to end a killed process
_HANDLE = ("poll", "kill", "wait", "fileno")


@dataclass
class Child:
    """A process of the run, and what its heartbeats said last. Times are of the supervisor's clock."""

    spec: ProcessSpec
    incarnation: int
    handle: Handle
    log: Path
    started: float
    """When it was told to begin, or when something has come that it needs before that."""
    beat: Heartbeat
    """The newest, or one without progress before the first."""
    identity: bytes = b""
    """Of its control socket."""
    found: bool = False
    """Whether another supervisor began it."""
    came: float = 0.0
    """What its handle has said of that."""
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

    def comes_nearer(self, now: float) -> bool:
        """Whether something has come, since this was asked last, that it needs before it can begin."""
        if (came := getattr(self.handle, "came", 0.0)) == self.came:
            return False
        self.came = came
        self.started = now
        return True

    def says_more(self, seconds: float) -> bool:
        """Whether it ended by an exception, whose message is on its way: a socket may be later than the kernel.

        seconds: how long it was waited for.
        """
        return self.handle.poll() == 1 and self.last_words is None and seconds < _LAST_WORDS_S

    def how_it_ended(self) -> tuple[str, str]:
        """How it ended, in a few words and in detail: its traceback, or the end of its log."""
        if self.last_words is not None:
            return self.last_words.message, self.last_words.detail

        if moved := self.moved:
            return moved, ""
        code = self.handle.poll() or 0
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == 0 and not (self.registered or self.found):  # one of ours that ends so has registered
            ended += " before it said anything (is it a wrapper that forks?)"
        return self.why_killed or ended, log_tail(self.log)

    @property
    def moved(self) -> str:
        """Why it had to end where it stood, which is no fault of its own; empty: it was not that."""
        return str(getattr(self.handle, "why", ""))

    def kill(self, why: str = "") -> None:
        """Kill it with all that it has begun, also where only the process itself has ended."""
        self.why_killed = self.why_killed or why
        self.handle.kill()


class Exits:
    """Wakes a poll when a process has ended, so that nobody has to look many times a second."""

    def __init__(self) -> None:
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """A descriptor that is readable once a process has ended, until `clear`."""
        return self._epoll.fileno()

    def watch(self, handle: Handle) -> None:
        if handle.fileno() >= 0:
            self._epoll.register(os.dup(handle.fileno()), select.EPOLLIN)

    def clear(self) -> bool:
        """Whether any has ended since the last call."""
        found = self._epoll.poll(0)
        for ended, _ in found:
            self._epoll.unregister(ended)
            os.close(ended)
        return bool(found)

    def close(self) -> None:
        """Stop watching, once all that are watched have ended."""
        self.clear()
        self._epoll.close()


def spawn(spec: ProcessSpec, run: RunFile, incarnation: int, launcher: Launcher, now: float) -> Child:
    """Start one process of the plan, by the supervisor's clock. Its log stands in the run's folder.

    Raises TypeError for a launcher that returns something else than it should, and whatever the launcher raises.
    """
    logs = run.folder / "logs"
    logs.mkdir(exist_ok=True)
    node = launcher.place(spec.role, spec.index)
    if not isinstance(node, Node):
        raise TypeError(f"place returned {node!r}, which is no Node")

    complete = spec.complete(run, incarnation, node)
    handle = launcher.start(complete, node)
    if missing := [name for name in _HANDLE if not callable(getattr(handle, name, None))]:
        raise TypeError(f"start returned {handle!r}, a handle without {', '.join(missing)}")

    silent = Heartbeat(spec.role, spec.index, incarnation, progress=-1, busy=False)
    name = run.names.of(spec.role, spec.index, incarnation)
    return Child(spec, incarnation, handle, complete.log, now, silent, name)


def adopt(spec: ProcessSpec, run: RunFile, found: Found, now: float) -> Child:
    """A process of the plan that another supervisor began, alive or not."""
    log = run.folder / "logs" / f"{spec.name}.{found.incarnation}.log"
    silent = Heartbeat(spec.role, spec.index, found.incarnation, progress=-1, busy=False)
    name = run.names.of(spec.role, spec.index, found.incarnation)
    return Child(spec, found.incarnation, found.handle, log, now, silent, name, found=True)


def wait_all(children: Iterable[Child], timeout_s: float) -> list[Child]:
    """The children that have not ended within this time."""
    until = time.monotonic() + timeout_s
    return [child for child in children if child.handle.wait(max(0.0, until - time.monotonic())) is None]


def end_all(children: list[Child], patience_s: float) -> list[str]:
    """Wait for children that were told to stop, then kill what is left of each.

    Returns the names of the children that had to be killed.
    """
    late = wait_all(children, patience_s)
    for child in children:
        child.kill()
    wait_all(late, _KILLED_S)
    return [child.name for child in late]


def log_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log; empty where there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
