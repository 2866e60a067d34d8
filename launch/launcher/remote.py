"""A process on another machine, as the head knows it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

from launch.launcher.node_messages import Begin, Start
from launch.launcher.protocol import Spec


class RemoteHandle:
    """A process on another machine. The launcher's thread says when it has ended."""

    why = ""
    """Why it ended, where that is no fault of its own: its machine is lost, or leaves."""

    def __init__(self, spec: Spec, lock: threading.RLock, wake: Callable[[], None]) -> None:
        self.spec = spec
        self.waits = True
        """For a machine with room."""
        self.killed = False
        self.unsaid = True
        """Whether its agent is still to be told of it."""
        self.begin: Begin | None = None
        """For a rank that begins where the ranks did not stand before."""
        self.log_bytes = 0
        self.came = 0.0
        """Another number whenever something has come for which it waits: files, or what the ranks are to begin from."""

        self._code: int | None = None
        self._lock = lock
        self._wake = wake
        self._has_ended = threading.Event()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def poll(self) -> int | None:
        return self._code

    def kill(self) -> None:
        """Its agent is told; it may be cut off, and then the lease of its machine decides."""
        with self._lock:
            self.killed = self.unsaid = True
            if self.waits:
                self.waits = False
                self.ended(-signal.SIGKILL)
        self._wake()

    def wait(self, timeout_s: float) -> int | None:
        self._has_ended.wait(timeout_s)
        return self._code

    def fileno(self) -> int:
        return self._event_fd

    def __del__(self) -> None:
        os.close(self._event_fd)

    # ------------------------------------------------------------ for the launcher's thread

    def move(self, why: str) -> None:
        """It is to end here and to begin elsewhere."""
        self.why = why
        self.kill()

    def ended(self, code: int, why: str = "") -> None:
        if self._code is None:
            self.why = self.why or why
            self._code = code
            self._has_ended.set()
            os.eventfd_write(self._event_fd, 1)

    def read(self, offset: int, data: bytes) -> None:
        """What follows in its log. A part that was left out has a line instead; what a full disk does not take is told
        again."""
        if offset < self.log_bytes:
            return
        left_out = offset - self.log_bytes
        line = f"\n({left_out} bytes stand on its machine)\n".encode() if left_out else b""
        with contextlib.suppress(OSError), self.spec.log.open("ab" if self.log_bytes else "wb", buffering=0) as log:
            written = log.write(line + data)  # the disk may have room for a part of it
            self.log_bytes = offset + max(0, written - len(line))

    def as_start(self, gpus: tuple[str, ...]) -> Start:
        """What an agent is told of it. gpus: those that it has there."""
        environment = dict(self.spec.environment)
        if "CUDA_VISIBLE_DEVICES" in environment:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return Start(self.spec.name, self.spec.module, list(self.spec.arguments), environment, self.begin)
