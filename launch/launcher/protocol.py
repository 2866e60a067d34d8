"""The seam "launcher": who starts the processes of a run, and says when one of them is dead.

The supervisor decides what starts, when and again; a launcher knows how, and where. It is named by `launcher`, as
`local` or `module:Name`, and made with the run: `Name(run)`.

What a handle says is the fence of the run: its peers send again what a process held only when it is dead for certain.
That is when `kill` was called and `poll` says that it ended. Then neither it nor what it has begun may act any more.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Node:
    """A machine, as its launcher knows it."""

    name: str
    host: str
    """The address at which its processes listen, and at which those of all nodes reach them."""


@dataclass(frozen=True)
class Spec:
    """One process to start: `python -m module arguments`, in a session of its own."""

    name: str
    """Role, index and incarnation, as in `generator.0.2`."""
    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    """Variables beside the node's own. By one of them others believe the process its name, so they stand in no log."""
    log: Path
    """The file for standard output and error."""
    gpus: tuple[str, ...] = ()
    """The GPUs as CUDA_VISIBLE_DEVICES names them, where it stands as well."""
    cores: tuple[int, ...] = ()
    """The cores that it may use; empty: all."""
    imports: tuple[str, ...] = field(default=(), kw_only=True)
    """What takes seconds to import. A launcher may have it ready."""

    def command(self) -> list[str]:
        """The command as it would be typed."""
        return [sys.executable, "-m", self.module, *self.arguments]


class Handle(Protocol):
    """A process that was started. It may have an attribute `why`: what ended it where that is no fault of its own, as
    the loss of its machine. Then its end does not count as a restart. And it may have an attribute `came`, another
    number whenever something has come that it needs before it begins: `timeouts.start_s` counts from then."""

    def poll(self) -> int | None:
        """Returns None while it runs; then its exit code, or minus the signal that ended it."""

    def kill(self) -> None:
        """End it by force, with all that it has begun; also what it left behind. Returns at once."""

    def wait(self, timeout_s: float) -> int | None:
        """The same as `poll`, which it asks until the process has ended or the time is over."""

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended; -1 where nobody can say: the supervisor looks four
        times a second."""


@dataclass(frozen=True)
class Found:
    """What became of a process that another supervisor of this run began: its newest incarnation."""

    incarnation: int
    handle: Handle


class Launcher(Protocol):
    """Called by the supervisor's main thread alone. It may have an attribute `found`: processes by their names, as
    `generator.0`, that were begun for this run before."""

    def place(self, role: str, index: int) -> Node:
        """Where the next incarnation of this process stands."""

    def start(self, spec: Spec, node: Node) -> Handle:
        """Returns at once. A process that cannot be started has a handle as well, which says that it ended."""

    def close(self) -> None:
        """End what is left at the end of the run: whatever was begun and still runs is killed."""
