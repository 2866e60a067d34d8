"""The ranks of a replay: this process is the first, the others are its children."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rl.wire.process import die_with_parent

_WAIT = timedelta(minutes=30)


@contextmanager
def joined(ranks: int, device: str, main: Callable[[int, Path], None]) -> Iterator[Path]:
    """In the block this process is rank 0 of a process group, and each child is in `main(rank, folder)`. The folder is
    a new one, for all of them."""
    how = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="fresco-replay-") as name:
        folder = Path(name)
        children = [
            how.Process(target=_child, args=(rank, ranks, device, main, folder), daemon=True)
            for rank in range(1, ranks)
        ]
        for child in children:
            child.start()

        _join(0, ranks, device, folder)
        try:
            yield folder
        finally:
            dist.destroy_process_group()
            for child in children:
                child.terminate()  # who is waited for no longer has nothing to say
                child.join()


def _child(rank: int, ranks: int, device: str, main: Callable[[int, Path], None], folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # the parent's handlers are for the parent
    die_with_parent()
    _join(rank, ranks, device, folder)
    main(rank, folder)


def _join(rank: int, ranks: int, device: str, folder: Path) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    store = dist.HashStore() if ranks == 1 else dist.FileStore(str(folder / "ranks"), ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=_WAIT)
