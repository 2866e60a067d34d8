"""One rank's rows of a version, cast and packed into one block of bytes on a device, and a digest made there."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rl.weights.host.layout import Manifest, digest

_WORDS = 1 << 14  # of a digest's block
_BLOCKS = 256  # at once

Table = list[tuple[str, int, tuple[int, ...], str]]
"""Name, first row, shape and dtype of each piece of a rank, as they are packed."""


def layout(table: Table) -> Manifest:
    return Manifest.layout((f"{name}@{row}", tuple(shape), dtype) for name, row, shape, dtype in table)


def places(table: Table, part: Tensor) -> list[Tensor]:
    """Each piece of the table in the packed bytes."""
    return [
        part[spec.offset : spec.offset + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec in layout(table).tensors
    ]


def device_digest(data: Tensor) -> int:
    """Of bytes on any device, a multiple of four: sums of blocks, plain and by place, which the host hashes."""
    words = data.view(torch.int32)
    whole = len(words) // _WORDS * _WORDS
    ramp = torch.arange(1, _WORDS + 1, device=data.device)
    sums = []
    for blocks in (*words[:whole].view(-1, _WORDS).split(_BLOCKS), words[None, whole:]):
        sums += [blocks.sum(1), (blocks * ramp[: blocks.shape[1]]).sum(1)]  # int64, which wraps
    return digest(torch.cat(sums).cpu().numpy().tobytes())


def combined(digests: Iterable[int]) -> int:
    """The checksum of a version, of those of all ranks."""
    return digest(np.array(list(digests), np.uint64).tobytes())
