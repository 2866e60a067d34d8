"""A digest of each tensor that is trained, the same for any number of ranks.

It is a sum over all elements, of their bits as whole numbers modulo 2^64. Each is multiplied by an odd number of its
row, and by one of its place in the row. So ranks add up what they hold, in whatever order, on the device where it is.
One flipped bit always shows, since no odd number makes a power of two vanish.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from rl.learner.credit import all_reduce
from rl.models.loading import is_told, local_part

_CHUNK = (1 << 18, 1 << 24)  # elements that are widened to 64 bits at once; not on a CPU, where each call costs more
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The constants of splitmix64, as signed numbers.
_STEP = -7046029254386353131
_MIX = -4658895280553007687
_MIX_AGAIN = -7723592293110705685


@torch.no_grad()
def tensor_digests(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The digests by name, in 16 hexadecimal digits. All ranks call it together, each with its rows."""
    sums = {}
    for name, tensor in named:
        rows, first = local_part(tensor)
        rows = rows if is_told(tensor) else rows[:0]
        sums[name] = _weighted(rows.flatten(1) if rows.ndim > 1 else rows.reshape(-1, 1), first)
    return _told(sums)


@torch.no_grad()
def place_digests(named: Mapping[str, Mapping[int, Tensor]]) -> dict[str, str]:
    """The digests of tables of rows (L,) by their place, which the ranks share in any way. Of unequal length."""
    sums = {}
    for name, rows in named.items():
        sums[name] = sum((_weighted(row[None], place) for place, row in rows.items()), torch.tensor(0))
    return _told(sums)


def _told(sums: Mapping[str, Tensor]) -> dict[str, str]:
    values = all_reduce(torch.stack([*sums.values()]), "sum").tolist() if sums else []
    return {name: f"{value % (1 << 64):016x}" for name, value in zip(sums, values, strict=True)}


def _weighted(rows: Tensor, first: int) -> Tensor:
    """The sum of the rows (n, width), the first of which stands at place `first` of the whole tensor."""
    width = rows.shape[1]
    bits = rows.contiguous().view(_BITS[rows.element_size()])
    columns = _odd(0, width, 1, rows.device)
    lines = max(1, _CHUNK[rows.device.type != "cpu"] // max(1, width))
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for place, own in enumerate(bits.split(lines)):
        total += ((own * columns).sum(1) * _odd(first + place * lines, len(own), 0, rows.device)).sum()
    return total


@lru_cache(maxsize=256)
def _odd(first: int, count: int, kind: int, device: torch.device) -> Tensor:
    """An odd number for each place from the first on, without any pattern."""
    mixed = (2 * torch.arange(first, first + count, device=device) + kind + 1) * _STEP
    mixed = (mixed ^ (mixed >> 30)) * _MIX
    mixed = (mixed ^ (mixed >> 27)) * _MIX_AGAIN
    return mixed | 1
