"""The launcher `local`: children of the supervisor, on its own machine.

Every child is a session leader, and dies with the supervisor. The supervisor is made a subreaper, so that grandchildren
whose parent died (an engine's workers) come back to it and are ended as well.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

from launch.launcher.protocol import Node, Spec
from rl.wire.process import adopt_orphans
from rl.wire.run import RunFile

Files = tuple[IO[Any], IO[Any], IO[Any]]
_GONE_S = 2.0  # for the kernel to end what is left of the run


class Command(NamedTuple):
    """A process to begin: `main()` of a module, as `python -m module arguments` would call it."""

    module: str
    arguments: Sequence[str]
    environment: dict[str, str]
    """Variables beside those of whoever begins it."""
    imports: Sequence[str] = ()
    """What takes seconds to import, where somebody has it ready."""


Begin = Callable[[Command, Files], psutil.Process]
"""Begins a child of this process, with standard input, output and error.

It leads a session, and dies with the thread that called."""


def begin_process(command: Command, files: Files) -> psutil.Process:
    """Start a process by its command line; it sees to its imports itself."""
    stdin, stdout, stderr = files
    return psutil.Popen(
        [sys.executable, "-m", command.module, *command.arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=os.environ | command.environment | {"FRESCO_PARENT_PID": str(os.getpid())},
        start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor only
    )


class LocalLauncher:
    """begin: how its processes begin. Make it before anything of the run is started."""

    def __init__(self, run: RunFile, begin: Begin = begin_process) -> None:
        adopt_orphans()
        self._begin = begin
        self._node = Node("local", run.config.network.host)
        self._others = descendants()  # of whoever runs this in a process of theirs
        # What libraries drop into their temporary folder goes with the run.
        self._environment = {"TMPDIR": str(run.socket_folder), "PYTHONUNBUFFERED": "1"}

    def place(self, role: str, index: int) -> Node:
        """This machine, for every process."""
        return self._node

    def start(self, spec: Spec, node: Node) -> LocalHandle:
        """A child of this process."""
        environment = spec.environment | self._environment
        with spec.log.open("wb") as log, Path(os.devnull).open("rb") as nothing:
            command = Command(spec.module, spec.arguments, environment, spec.imports)
            begun = self._begin(command, (nothing, log, log))

        if spec.cores:
            with contextlib.suppress(psutil.NoSuchProcess):
                begun.cpu_affinity(list(spec.cores))
        return LocalHandle(begun)

    def close(self) -> None:
        """Kill every process below this one but those that were there before."""
        end_descendants(spared=self._others)


class LocalHandle:
    """The kernel says whether it lives. A pidfd tells at once when it does not (Linux 5.3)."""

    def __init__(self, begun: psutil.Process) -> None:
        self._begun = begun
        self._descriptor = -1
        with contextlib.suppress(OSError):  # where the kernel does not allow it, nothing wakes
            self._descriptor = os.pidfd_open(begun.pid)

    def poll(self) -> int | None:
        return self.wait(0)

    def kill(self) -> None:
        """Kill its whole process group, also where only the leader has ended; a copy that just began has none."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._begun.pid, signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            self._begun.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> int | None:
        with contextlib.suppress(psutil.TimeoutExpired):
            return self._begun.wait(timeout_s)
        return None

    def fileno(self) -> int:
        return self._descriptor

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


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
    psutil.wait_procs(begun, timeout=_GONE_S)
