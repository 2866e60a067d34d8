"""Tensors and a slot: a rank's rows into it, the engine's tensors out of it. torch is imported where one is met."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from rl.weights.channel import ITEM_BYTES, Piece, WeightsError
from rl.weights.host.layout import Manifest, Segment, TensorSpec, digest

if TYPE_CHECKING:
    from torch import Tensor

_DEVICE_CHUNK_BYTES = 64 << 20  # from a GPU: few large transfers
_THREAD_BYTES = 32 << 20  # less is hashed sooner than another thread has a core, where all cores are in use
# The engine only reads; a slot is mapped read-only on purpose.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def write(view: memoryview, manifest: Manifest, pieces: Iterable[Piece]) -> list[Segment]:
    """Copy this rank's pieces into the slot and return the segments to commit.

    The cast to the engine's dtype happens in the copy, and a second thread hashes what is written (both release the
    interpreter lock), unless it is little. Raises WeightsError for an unknown name or rows that do not fit.
    """
    written = _write_all(view, manifest, pieces)
    if manifest.total_bytes < _THREAD_BYTES:
        return [(begin, length, digest(view[begin : begin + length])) for begin, length in written]

    with ThreadPoolExecutor(1, "weights-digest") as hashing:
        hashed = [(begin, length, hashing.submit(digest, view[begin : begin + length])) for begin, length in written]
        return [(begin, length, future.result()) for begin, length, future in hashed]


def tensors(manifest: Manifest, view: memoryview) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a leased slot as (name, tensor on the view's own bytes). Read only; valid until `release()`."""
    import torch

    for spec in manifest.tensors:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if not spec.nbytes:
            yield spec.name, torch.empty(spec.shape, dtype=dtype)
            continue
        count = spec.nbytes // ITEM_BYTES[spec.dtype]
        yield spec.name, torch.frombuffer(view, dtype=dtype, count=count, offset=spec.offset).view(spec.shape)


def _write_all(view: memoryview, manifest: Manifest, pieces: Iterable[Piece]) -> Iterator[tuple[int, int]]:
    """Offset and length of each range, as soon as it is written."""
    specs = {spec.name: spec for spec in manifest.tensors}
    for name, local, placement in pieces:
        if name not in specs:
            raise WeightsError(f"tensor {name!r} is not in the manifest of {len(specs)} tensors")
        if 0 in local.shape:
            continue

        spec = specs[name]
        begin = spec.offset + placement.row * spec.row_bytes
        length = math.prod(local.shape) * ITEM_BYTES[spec.dtype]
        if begin + length > spec.offset + spec.nbytes or tuple(local.shape[1:]) != spec.shape[1:]:
            rows = f"rows from {placement.row} on of shape {tuple(local.shape)}"
            raise WeightsError(f"tensor {name!r} of shape {spec.shape}: {rows} do not fit")
        if isinstance(local, np.ndarray):
            np.frombuffer(view, spec.dtype, local.size, begin)[:] = local.ravel()
        else:
            _copy(view, begin, spec, local.detach().reshape(-1))
        yield begin, length


def _copy(view: memoryview, begin: int, spec: TensorSpec, source: Tensor) -> None:
    import torch

    dtype: torch.dtype = getattr(torch, spec.dtype)
    target = torch.frombuffer(view, dtype=dtype, count=source.numel(), offset=begin)
    if source.device.type == "cpu":
        target.copy_(source)
        return
    step = _DEVICE_CHUNK_BYTES // ITEM_BYTES[spec.dtype]
    for chunk, into in zip(source.split(step), target.split(step), strict=True):
        into.copy_(chunk.to(dtype))  # the cast comes first: half the bytes cross the bus
