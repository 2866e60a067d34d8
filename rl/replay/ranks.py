"""The ranks of a replay: this process where there is one, else its children, which tell as bytes what they found."""

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

import msgspec
import torch
import torch.distributed as dist

from rl.config.plugins import told
from rl.wire.process import die_with_parent

_WAIT = timedelta(minutes=30)
Main = Callable[[int, Path], Iterator[Any]]


def on_ranks(kind: type, ranks: int, device: str, main: Main) -> Iterator[Any]:
    """What `main(rank, folder)` gives on rank 0, while the others go through theirs in step. The folder is a new one.

    kind: of what it gives; MessagePack carries it, and no text. Raises what this process raises as a rank; ValueError
    where a child does. Torch caches where a rank's rows stand, so this process is none of several. It has threads,
    which a copy of it would lack: several are copies of a process that has imported and done nothing else.
    """
    with tempfile.TemporaryDirectory(prefix="fresco-replay-") as name:
        folder = Path(name)
        if ranks > 1:
            yield from _of_children(kind, ranks, device, main, folder)
            return
        _join(0, 1, device, folder)
        try:
            yield from main(0, folder)
        finally:
            dist.destroy_process_group()


def _of_children(kind: type, ranks: int, device: str, main: Main, folder: Path) -> Iterator[Any]:
    how = multiprocessing.get_context("forkserver")
    how.set_forkserver_preload(["rl.learner.trainer"])
    hear, tell = how.Pipe(duplex=False)
    shared = (ranks, device, main, folder, tell)
    children = [how.Process(target=_child, args=(rank, *shared), daemon=True) for rank in range(ranks)]
    for child in children:
        child.start()
    tell.close()

    decoder = msgspec.msgpack.Decoder(kind | str | None)
    try:
        while (found := decoder.decode(hear.recv_bytes())) is not None:
            if isinstance(found, str):
                raise ValueError(found)
            yield found
    except EOFError:
        raise ValueError("a rank of the replay died; what it said stands above") from None
    finally:
        for child in children:
            child.terminate()  # who is waited for no longer has nothing to say
            child.join()


def _child(rank: int, ranks: int, device: str, main: Main, folder: Path, tell: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # it is for the parent, which ends us
    die_with_parent(os.getppid())

    try:
        _join(rank, ranks, device, folder)
        for each in main(rank, folder):
            if rank == 0:
                tell.send_bytes(msgspec.msgpack.encode(each))
        if rank == 0:
            tell.send_bytes(msgspec.msgpack.encode(None))
    except Exception as error:
        tell.send_bytes(msgspec.msgpack.encode(told(error)))


def _join(rank: int, ranks: int, device: str, folder: Path) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(folder / "ranks"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=_WAIT)
