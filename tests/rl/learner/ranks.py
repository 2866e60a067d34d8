"""Ranks of torch.distributed, as processes of this machine that speak gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.copies import COPIES


@contextmanager
def process_group(folder: Path | str, rank: int = 0, ranks: int = 1) -> Iterator[DeviceMesh]:
    """This process as one of `ranks`, which meet in `folder`; their mesh, of one dimension."""
    store = dist.FileStore(f"{folder}/store", ranks)
    timeout = timedelta(seconds=20) if ranks == 1 else None
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def results_of_ranks(main: Callable[[int, str], None], folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What `main(rank, folder)` saves as `folder/rank{rank}.pt` in a process of each rank."""
    multiprocessing.start_processes(main, (str(folder),), nprocs=ranks, start_method=COPIES.get_start_method())
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]
