"""The torch side of a slot: a rank's rows into it, the engine's tensors out of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from rl.weights.layout import ITEM_BYTES, Manifest, Segment, TensorSpec, WeightsError, digest

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DEVICE_CHUNK_BYTES = 64 << 20  # from a GPU: few large transfers
_THREAD_BYTES = 32 << 20  # less is hashed sooner than another thread has a core, where all cores are in use
# The engine only reads; a slot is mapped read-only on purpose.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def write_shard(
    view: memoryview, manifest: Manifest, name_to_local_rows: Iterable[tuple[str, torch.Tensor, int]]
) -> list[Segment]:
    """Copy this rank's rows into the slot and return the segments to commit.

    Each item is (name, local, row): `local` (rows, ...) are the rows of tensor `name` from row `row` on, in any
    dtype and on any device; empty shards are allowed. The cast to the engine's dtype happens in the copy, and a
    second thread hashes what is written (both release the interpreter lock), unless it is little. Raises WeightsError
    for an unknown name or rows that do not fit.
    """
    written = _write(view, manifest, name_to_local_rows)
    if manifest.total_bytes < _THREAD_BYTES:
        return [(begin, length, digest(view[begin : begin + length])) for begin, length in written]

    with ThreadPoolExecutor(1, "weights-digest") as hashing:
        hashed = [(begin, length, hashing.submit(digest, view[begin : begin + length])) for begin, length in written]
        return [(begin, length, future.result()) for begin, length, future in hashed]


def _write(
    view: memoryview, manifest: Manifest, name_to_local_rows: Iterable[tuple[str, torch.Tensor, int]]
) -> Iterator[tuple[int, int]]:
    """Offset and length of each range, as soon as it is written."""
    specs = {spec.name: spec for spec in manifest.tensors}
    for name, local, row in name_to_local_rows:
        if name not in specs:
            raise WeightsError(f"tensor {name!r} is not in the manifest of {len(specs)} tensors")
        if local.numel():
            yield _write_rows(view, specs[name], local, row)


def _write_rows(view: memoryview, spec: TensorSpec, local: torch.Tensor, row: int) -> tuple[int, int]:
    """The bytes written: offset and length."""
    begin = spec.offset + row * spec.row_bytes
    length = local.numel() * ITEM_BYTES[spec.dtype]
    if begin + length > spec.offset + spec.nbytes or tuple(local.shape[1:]) != spec.shape[1:]:
        raise WeightsError(
            f"tensor {spec.name!r} of shape {spec.shape}: rows from {row} on of shape {tuple(local.shape)} do not fit"
        )

    dtype = _DTYPES[spec.dtype]
    source = local.detach().reshape(-1)
    target = torch.frombuffer(view, dtype=dtype, count=source.numel(), offset=begin)
    if source.device.type == "cpu":
        target.copy_(source)
    else:
        step = _DEVICE_CHUNK_BYTES // ITEM_BYTES[spec.dtype]
        for chunk, into in zip(source.split(step), target.split(step), strict=True):
            into.copy_(chunk.to(dtype))  # the cast comes first: half the bytes cross the bus
    return begin, length


def tensors(manifest: Manifest, view: memoryview) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a leased slot as (name, tensor on the view's own bytes). Read only; valid until `release()`."""
    for spec in manifest.tensors:
        dtype = _DTYPES[spec.dtype]
        if not spec.nbytes:
            yield spec.name, torch.empty(spec.shape, dtype=dtype)
            continue
        count = spec.nbytes // ITEM_BYTES[spec.dtype]
        yield spec.name, torch.frombuffer(view, dtype=dtype, count=count, offset=spec.offset).view(spec.shape)
