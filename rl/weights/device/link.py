"""What a channel from device to device needs of both its ends: where they meet, a group of two, a digest of bytes.

On one machine they meet in a file of the run's folder, which only its owner can open. Rank 0 of the learner holds a
lock on it, which tells the living from the dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo, Store

from rl.weights.host.ends import wait_for
from rl.wire.run import RunFile

_TICK_S = 0.01
_TRANSFER_TICK_S = 0.0005
_LOOK_S = 0.5  # between two looks at whether the other side is still there


def meet(run: RunFile) -> tuple[contextlib.ExitStack, Store]:
    """To be called on rank 0: the store, and what is to be closed at the end."""
    ends = contextlib.ExitStack()
    path = run.folder / f"weights.{time.time_ns()}"
    file = ends.enter_context(_place_file(run).open("a"))
    file.truncate(0)  # before the lock: that of another one must not stand there as if it lived
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(str(path))
    file.flush()
    ends.callback(path.unlink, missing_ok=True)
    return ends, FileStore(str(path), -1)


def meeting_place(run: RunFile) -> str | None:
    """Where rank 0's store is; None while there is no rank 0."""
    with contextlib.suppress(FileNotFoundError), _place_file(run).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # its owner lives
            return file.read() or None
    return None


def connected(run: RunFile, seconds: float, who: str) -> tuple[str, Store]:
    """The meeting place and its store. Raises WaitExpired."""
    place = wait_for(lambda: meeting_place(run), seconds, lambda: f"{who} waits for learner rank 0's store of weights")
    return place, FileStore(place, -1)


class Link:
    """A group of two: a rank of the learner (0) sends, a rank of an engine (1) receives.

    `check` is called while it waits: it raises where the other side has gone. For one thread at a time.
    """

    def __init__(self, run: RunFile, store: Store, rank: int, device: torch.device, check: Callable[[], None]) -> None:
        self._run = run
        self._store = store
        self._rank = rank
        self._device = device
        self._check = check
        self._deadline_s = run.config.weights.deadline_s
        self._group: Any = None

    def transfer(self, data: Tensor) -> None:
        """Send `data`, or receive into it. Raises RuntimeError where that stands still or breaks off."""
        self._group = self._group or self._join()
        work = self._group.broadcast(data, 0)
        self.wait_for(work.is_completed, self._deadline_s, _TRANSFER_TICK_S)
        work.wait()

    def wait_for(self, there: Callable[[], bool], seconds: float = float("inf"), every_s: float = _TICK_S) -> None:
        until = time.monotonic() + seconds
        look = 0.0
        while not there():
            if (now := time.monotonic()) > until:
                raise RuntimeError(f"the other side has stood still for {seconds:g} s")
            if now >= look:
                self._check()
                look = now + _LOOK_S
            time.sleep(every_s)

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = None

    def _join(self) -> Any:
        """Both sides come at about the same time: the store is asked for no longer than the deadline."""
        timeout = timedelta(seconds=self._deadline_s)
        if self._device.type == "cpu":
            gloo: Any = ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self._run.host)]
            options._timeout = timeout
            return gloo(self._store, self._rank, 2, options)

        from torch.distributed import ProcessGroupNCCL  # a build for CPUs has none

        torch.cuda.set_device(self._device)  # of this thread
        nccl_options = ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout * 10  # its watchdog ends the whole process: our own deadline comes first
        nccl_options.config.blocking = 0  # else a peer that dies while it joins would be waited for without end
        return ProcessGroupNCCL(self._store, self._rank, 2, nccl_options)


def _place_file(run: RunFile) -> Path:
    return run.folder / "weights.place"
