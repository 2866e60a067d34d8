"""The few Linux calls that Python 3.11 does not have: mounts and mount namespaces of a thread."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
CLONE_FS = 0x00000200
CLONE_NEWNS = 0x00020000
# What reading a task's /proc file raises when the task ends before it is opened, or while it is read.
_TASK_ENDED = (FileNotFoundError, ProcessLookupError)


def mount(source: str, target: str | Path, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2). Raises OSError naming the target."""
    _check(
        _libc.mount(source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data.encode()),
        f"mount {kind or 'bind'} on {target}",
    )


def bind(source: str | Path, target: str | Path, *, read_only: bool = False) -> None:
    """A bind mount of a folder or file, without setuid and devices."""
    mount(str(source), target, "", MS_BIND | MS_REC)
    if read_only:
        mount("none", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def enter_new_mount_namespace() -> int:
    """Give the calling thread mounts of its own, unseen outside; a descriptor of the namespace for other threads."""
    _check(_libc.unshare(CLONE_NEWNS), "unshare(CLONE_NEWNS)")
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    return os.open(f"/proc/self/task/{threading.get_native_id()}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)


def join_mount_namespace(descriptor: int) -> None:
    """Move the calling thread, and the processes it starts from now on, into the namespace."""
    _check(_libc.unshare(CLONE_FS), "unshare(CLONE_FS)")
    _check(_libc.setns(descriptor, CLONE_NEWNS), "setns(mount namespace)")


def reap_orphans(uid: int) -> None:
    """Reap this process's dead children of a uid: until then they count against the uid's limit on processes.

    Not while a command of that uid runs: its starter waits for it.
    """
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(*_TASK_ENDED):
            for child in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(*_TASK_ENDED, ChildProcessError):
                    if _real_uid(child) == uid:
                        os.waitpid(child, os.WNOHANG)


def _real_uid(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Uid:")).split()[1])


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
