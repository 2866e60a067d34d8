"""The ranks of a replay: this process where there is one, else its children."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl.config.plugins import own_place, told
from rl.wire.process import die_with_parent

_WAIT = timedelta(minutes=30)
Main = Callable[[int, Path], Iterator[Any]]


def on_ranks(ranks: int, device: str, main: Main) -> Iterator[Any]:
    """What `main(rank, folder)` gives on rank 0, while the others go through theirs in step. The folder is a new one.

    Raises what a rank raises. Torch caches where a rank's rows stand, so this process is none of several. It has
    threads, which a copy of it would lack: several are copies of a process that has imported and done nothing else.
    """
    with tempfile.TemporaryDirectory(prefix="fresco-replay-") as name:
        folder = Path(name)
        if ranks > 1:
            yield from _of_children(ranks, device, main, folder)
            return
        _join(0, 1, device, folder)
        try:
            yield from main(0, folder)
        finally:
            dist.destroy_process_group()


def _of_children(ranks: int, device: str, main: Main, folder: Path) -> Iterator[Any]:
    how = multiprocessing.get_context("forkserver")
    how.set_forkserver_preload(["rl.learner.trainer"])
    found, tell = how.Pipe(duplex=False)
    children = [
        how.Process(target=_child, args=(rank, ranks, device, main, folder, tell), daemon=True) for rank in range(ranks)
    ]
    for child in children:
        child.start()
    tell.close()

    try:
        while (told := found.recv()) is not None:
            if isinstance(told, Exception):
                raise told
            yield told
    except EOFError:
        raise ValueError("a rank of the replay died; what it said stands above") from None
    finally:
        for child in children:
            child.terminate()  # who is waited for no longer has nothing to say
            child.join()


def _child(rank: int, ranks: int, device: str, main: Main, folder: Path, tell: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # the parent's handlers are for the parent
    die_with_parent(os.getppid())

    try:
        _join(rank, ranks, device, folder)
        for each in main(rank, folder):
            if rank == 0:
                tell.send(each)
        if rank == 0:
            tell.send(None)
    except Exception as error:
        # Where it was raised stays behind, and so may a class of the user's own.
        tell.send(ValueError(told(error)) if own_place(error) else error)


def _join(rank: int, ranks: int, device: str, folder: Path) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    store = dist.HashStore() if ranks == 1 else dist.FileStore(str(folder / "ranks"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=_WAIT)
