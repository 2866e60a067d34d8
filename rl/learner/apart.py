"""Ranks that have another folder than rank 0: on machines that share none, each writes its part of a checkpoint there.

They send it to rank 0, as bytes, over the ranks' own connections. So a checkpoint is whole where rank 0 stands, and
whoever copies it from there has all of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from rl.learner.credit import gathered

_CHUNK_BYTES = 16 << 20


def ranks_apart(folder: Path) -> list[int]:
    """The ranks whose folder of the run is not that of rank 0. All ranks call it together."""
    homes = gathered(str(folder).encode())
    return [rank for rank, home in enumerate(homes) if home != homes[0]]


def bring_home(state: Path, apart: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
    """Rank 0 gets what the ranks `apart` have written into their folder `state`, where it is removed. All ranks call it
    together, once everything is written."""
    if not apart:
        return
    me = dist.get_rank()
    own = sorted(state.glob(f"__{me}_*")) if me in apart else []
    files = gathered(msgspec.json.encode([(path.name, path.stat().st_size) for path in own]), group)

    for rank in apart:
        for name, size in msgspec.json.decode(files[rank], type=list[tuple[str, int]]):
            path = state / Path(name).name
            if me == rank:
                _send(path, group)
                path.unlink()
            elif me == 0:
                _receive(path, size, rank, group)

    if me in apart:
        with contextlib.suppress(OSError):  # where another rank of this machine has files in it
            state.rmdir()
            state.parent.rmdir()


def bring_out(path: Path, apart: Sequence[int]) -> None:
    """The ranks `apart` get a file of rank 0's folder under the same name in theirs. All ranks call it together, with
    their own path."""
    if apart:
        content = gathered(path.read_bytes() if dist.get_rank() == 0 else b"")[0]
        if dist.get_rank() in apart:
            partial = path.with_name(f"{path.name}.{dist.get_rank()}")  # others may have the same folder
            partial.write_bytes(content)
            partial.rename(path)


def _send(path: Path, group: dist.ProcessGroup | None) -> None:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            dist.send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), 0, group=group)


def _receive(path: Path, size: int, rank: int, group: dist.ProcessGroup | None) -> None:
    with path.open("wb") as file:
        for start in range(0, size, _CHUNK_BYTES):
            chunk = torch.empty(min(_CHUNK_BYTES, size - start), dtype=torch.uint8)
            dist.recv(chunk, rank, group=group)
            file.write(chunk.numpy().data)
