"""Memory of a whole process tree: a control group where the host lets us make one, else a watchdog over a uid.

One tracker per slot, used again and again. The control group also counts what is written to the slot's disk, which
lives in memory; so its limit is memory plus disk. The watchdog sees resident memory every `WATCH_S` seconds: a burst
can pass the limit for that long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from envs.sandbox.base import Limits, SandboxError

WATCH_S = 0.05
_KILL_DEADLINE_S = 10.0
_PAGE = os.sysconf("SC_PAGESIZE")


class ProcessTree(Protocol):
    """All processes of one slot, and the limit of their memory."""

    watched: bool
    """Whether `exceeded` must be asked while a command runs; the kernel enforces the limit otherwise."""

    def set_limits(self, limits: Limits) -> None: ...

    def command_prefix(self) -> list[str]:
        """Put before a command's argv: places it, and all its children, in the tree."""
        ...

    def exceeded(self) -> bool:
        """Whether the limit was hit since `set_limits` or the last time it was asked."""
        ...

    def processes(self) -> list[int]: ...

    def remove(self) -> None: ...


def kill_tree(tree: ProcessTree) -> None:
    """Kill every process of the tree and wait until none is left. Raises SandboxError past a deadline."""
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while pids := tree.processes():
        if time.monotonic() > deadline:
            raise SandboxError(f"processes {pids[:5]} of a sandbox did not die within {_KILL_DEADLINE_S:.0f} s")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.0005)


class Watchdog:
    """Resident memory of all processes of one uid, which no other process of the host has."""

    watched = True

    def __init__(self, uid: int) -> None:
        self._uid = uid
        self._limit = 0

    def set_limits(self, limits: Limits) -> None:
        self._limit = limits.memory_bytes

    def command_prefix(self) -> list[str]:
        return []

    def exceeded(self) -> bool:
        return sum(map(_resident_bytes, self.processes())) > self._limit

    def processes(self) -> list[int]:
        return [pid for pid in _all_pids() if _alive_of(pid, self._uid)]

    def remove(self) -> None:
        pass


class ControlGroup:
    """One group below a memory controller of version 1 or 2."""

    watched = False

    def __init__(self, folder: Path, version: int) -> None:
        self._folder = folder
        self._version = version
        folder.mkdir()
        self._kills = 0

    def set_limits(self, limits: Limits) -> None:
        limit = "memory.max" if self._version == 2 else "memory.limit_in_bytes"
        swap = "memory.swap.max" if self._version == 2 else "memory.swappiness"
        # A kernel without swap accounting has nothing to limit.
        with contextlib.suppress(OSError):
            (self._folder / swap).write_text("0")
        try:
            (self._folder / limit).write_text(str(limits.memory_bytes + limits.disk_bytes))
        except OSError as error:
            raise SandboxError(f"cannot limit memory in {self._folder}: {error}") from None
        self._kills = self._oom_kills()

    def command_prefix(self) -> list[str]:
        script = 'echo 0 > "$1" && shift && exec "$@"'
        return ["/bin/sh", "-c", script, "sh", str(self._folder / "cgroup.procs")]

    def exceeded(self) -> bool:
        before = self._kills
        self._kills = self._oom_kills()
        return self._kills > before

    def processes(self) -> list[int]:
        return [int(line) for line in (self._folder / "cgroup.procs").read_text().split()]

    def remove(self) -> None:
        kill_tree(self)
        deadline = time.monotonic() + 1.0
        while True:
            try:
                self._folder.rmdir()
                return
            except OSError:
                if time.monotonic() > deadline:
                    # An empty group is no process and no mount; the next start sweeps it.
                    return
                time.sleep(0.005)

    def _oom_kills(self) -> int:
        text = (self._folder / ("memory.events" if self._version == 2 else "memory.oom_control")).read_text()
        return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), 0)


def memory_controller() -> tuple[Path, int] | None:
    """The folder below which groups can be made, and the version; None if the host offers none."""
    candidates = ((Path("/sys/fs/cgroup/memory"), 1), (Path("/sys/fs/cgroup"), 2))
    for folder, version in candidates:
        probe = folder / f"fresco-probe-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        usable = (probe / ("memory.max" if version == 2 else "memory.limit_in_bytes")).exists()
        probe.rmdir()
        if usable:
            return folder, version
    return None


def sweep_groups(controller: Path) -> None:
    """Remove the groups of processes that are gone (`fresco-PID-UID`)."""
    for folder in controller.glob("fresco-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _alive_of(pid: int, uid: int) -> bool:
    """Real, effective or saved uid; not /proc's owner, which a process can turn into root by not being dumpable."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    values = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return str(uid) in values["Uid"] and values["State"][0] not in "ZX"


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0
