"""Faults, done to the processes of a live run from outside: nothing in the run knows of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from experiments.chaos.schedule import MODULES, Fault

PAUSE_S = 1.0
SIGNALS = {"pause": signal.SIGSTOP, "stop": signal.SIGSTOP, "raise": signal.SIGUSR1}
RAISING = """
import signal

def _raise(*_):
    raise RuntimeError("injected")

signal.signal(signal.SIGUSR1, _raise)
"""
"""Python runs it as `sitecustomize` when a process begins: what `raise` needs in it."""
_STARTED_S = 10.0
_PIDFD_GETFD = 438  # the system call's number, on every architecture


class Injector:
    """`supervisor`: the process whose children are the run; `runs`: the folder on the file system to fill."""

    def __init__(self, supervisor: psutil.Process, runs: Path) -> None:
        self._supervisor = supervisor
        self._runs = runs

    def inject(self, fault: Fault) -> str | None:
        """What was done, in words; None if no process of the role can be met by it now."""
        if fault.kind == "disk":
            self._fill_disk()
            return "full disk"

        targets = self._grandchildren() if fault.kind == "child" else self._of(fault.role)
        if fault.kind == "stop":  # one that has not registered yet is given timeouts.start_s, which is a long time
            targets = [target for target in targets if time.time() - target.create_time() > _STARTED_S]
        if not targets:
            return None
        target = targets[int(fault.draw * len(targets))]
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            return self._meet(target, fault)
        return None

    def _meet(self, target: psutil.Process, fault: Fault) -> str | None:
        name = f"{fault.role} (pid {target.pid})"
        if fault.kind == "cut":
            return f"cut {name}" if cut_connection(target.pid, random.Random(fault.draw)) else None

        target.send_signal(SIGNALS.get(fault.kind, signal.SIGKILL))
        if fault.kind == "pause":
            threading.Timer(PAUSE_S, _go_on, [target]).start()
        return f"{fault.kind} {name}"

    def _of(self, role: str) -> list[psutil.Process]:
        """Living processes of a role that are not stopped, by their command lines."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child for child in self._supervisor.children() if _is(child, MODULES[role])]
        return []

    def _grandchildren(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for process in self._of("generator") + self._of("env_server"):
            with contextlib.suppress(psutil.NoSuchProcess):
                found += process.children(recursive=True)
        return found

    def _fill_disk(self) -> None:
        """All that is left of the file system, for PAUSE_S. Only ever called on one that the experiment has mounted."""
        filler = self._runs / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        threading.Timer(PAUSE_S, filler.unlink, [True]).start()


def _is(process: psutil.Process, module: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        command = " ".join(process.cmdline())
        is_role = f" {module}" in command and "launch.cpu.fork_server" not in command  # which names what it imports
        return is_role and process.status() != psutil.STATUS_STOPPED
    return False


def _go_on(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


def cut_connection(pid: int, chance: random.Random) -> bool:
    """Shut down one of the process's connections to another process of the run; False if it has none."""
    descriptors = list(_sockets(pid))
    chance.shuffle(descriptors)
    for descriptor in descriptors:
        with _borrowed(pid, descriptor) as one:
            if one is not None and _is_connection(one):
                one.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _sockets(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(link).startswith("socket:"):
                    yield int(link.name)


@contextlib.contextmanager
def _borrowed(pid: int, descriptor: int) -> Iterator[socket.socket | None]:
    """A socket of another process (pidfd_getfd: the same user, or root)."""
    pidfd = os.pidfd_open(pid)
    try:
        own = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
        if own < 0:
            yield None
            return
        with socket.socket(fileno=own) as one:
            yield one
    finally:
        os.close(pidfd)


def _is_connection(one: socket.socket) -> bool:
    """Whether it is a connection of ZeroMQ to a named endpoint: a file of the run, or a port."""
    if one.type != socket.SOCK_STREAM or one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    with contextlib.suppress(OSError):
        return bool(one.getpeername() or one.getsockname())
    return False
