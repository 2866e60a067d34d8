"""The bytes of one version: where each tensor stands, and digests that prove that they arrived.

A version is one block of `Manifest.total_bytes` bytes, a *slot*. Every tensor stands in it at a fixed offset in the
engine's dtype, so both sides agree on the layout once and exchange bytes only. Each learner rank writes its own rows
(FSDP `Shard(0)`) as *segments*, byte ranges of the slot, and publishes a digest of each; a reader verifies all of them.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Struct

from rl.weights.channel import ITEM_BYTES, Entry, WeightsCorrupt

ALIGNMENT = 64  # bytes: a cache line, and the widest vector load
PART_BYTES = 64 << 20  # longest range of one digest: several threads share a large tensor
_THREADS = min(8, len(os.sched_getaffinity(0)))  # one hashes 6 to 8 GB/s, and a GPU copies 55
_THREAD_BYTES = 32 << 20  # less is hashed sooner than another thread has a core, where all cores are in use

Segment = tuple[int, int, int]
"""(offset, length) in bytes of the slot, and the digest of those bytes."""

Segments = npt.NDArray[np.uint64]
"""(segments, 3): offset, length and digest of each, by offset."""


class TensorSpec(Struct, frozen=True, array_like=True):
    """Where one tensor stands in a slot; `offset` is a multiple of 64, `nbytes` excludes padding."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # float32 | bfloat16
    offset: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the first axis (of the whole tensor if it is a scalar or empty)."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes


class Manifest(Struct, frozen=True):
    """The layout of a slot, in the order of the tensors."""

    tensors: tuple[TensorSpec, ...]
    total_bytes: int

    @classmethod
    def layout(cls, entries: Iterable[Entry]) -> Manifest:
        """Lay them out one after another, each aligned.

        Raises ValueError for an unknown dtype, and for a name that stands twice.
        """
        tensors: list[TensorSpec] = []
        offset = 0
        for name, shape, dtype in entries:
            if dtype not in ITEM_BYTES:
                raise ValueError(f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
            nbytes = math.prod(shape) * ITEM_BYTES[dtype]
            tensors.append(TensorSpec(name, tuple(shape), dtype, offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT

        for name, count in Counter(spec.name for spec in tensors).items():
            if count > 1:
                raise ValueError(f"tensor {name!r} is listed twice")
        return cls(tuple(tensors), offset)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest that `encode` wrote."""
        return msgspec.msgpack.decode(data, type=cls)

    def encode(self) -> bytes:
        """The manifest as MessagePack, for a file or a message."""
        return msgspec.msgpack.encode(self)

    def spans(self) -> npt.NDArray[np.int64]:
        """(tensors, 2): first byte and one past the last byte of each tensor that is not empty."""
        found = [(spec.offset, spec.offset + spec.nbytes) for spec in self.tensors if spec.nbytes]
        return np.array(found, np.int64).reshape(-1, 2)

    def runs(self, segments: Segments, *, mixed: bool = True) -> list[tuple[int, int, int]]:
        """What one rank wrote, in order, with the padding between its tensors and nothing of another rank: first byte,
        one past the last one, and the width of its items. Items of another width begin another run, unless `mixed`."""
        padding = {spec.offset + spec.nbytes for spec in self.tensors}  # where the gap up to the next tensor starts
        starts = [spec.offset for spec in self.tensors]
        found: list[tuple[int, int, int]] = []
        for offset, length, _ in segments.tolist():
            width = ITEM_BYTES[self.tensors[bisect_right(starts, offset) - 1].dtype]
            _, end, last = found[-1] if found else (0, -1, 0)
            follows = -(-end // ALIGNMENT) * ALIGNMENT if end in padding else end
            begin = found.pop()[0] if offset == follows and (mixed or width == last) else offset
            found.append((begin, offset + length, width))
        return found

    def name_at(self, offset: int) -> str:
        """Which tensor holds this byte, for messages."""
        inside = [spec.name for spec in self.tensors if spec.offset <= offset < spec.offset + spec.nbytes]
        return f"tensor {inside[0]!r}" if inside else "padding"

    def damage(self, offset: int, length: int) -> str:
        """What is told of a range whose digest is another one."""
        return f"{self.name_at(offset)}: {length} bytes at offset {offset} differ from what the learner wrote"


def digest(data: bytes | memoryview) -> int:
    """64-bit digest of one byte range (XXH3: against errors, not against adversaries)."""
    return xxhash.xxh3_64_intdigest(data)


def digests(data: memoryview, ranges: Iterable[tuple[int, int]]) -> Iterator[Segment]:
    """Each range of a slot with its digest, in order.

    Threads hash a range as soon as `ranges` has given it, and release the interpreter lock; none for a small slot.
    """
    if data.nbytes < _THREAD_BYTES:
        yield from ((begin, length, digest(data[begin : begin + length])) for begin, length in ranges)
        return

    with ThreadPoolExecutor(_THREADS, "weights-digest") as hashing:
        hashed = [(begin, length, hashing.submit(digest, data[begin : begin + length])) for begin, length in ranges]
        yield from ((begin, length, future.result()) for begin, length, future in hashed)


def combined_checksum(segments: Segments) -> int:
    """One number for a version, the same on both sides: the digest of its segments, by offset."""
    rows = segments[np.argsort(segments[:, 0])]
    return digest(np.ascontiguousarray(rows, dtype="<u8").tobytes())


def part_of(segments: Segments, rank: int, ranks: int) -> Segments:
    """Those that one of several ranks verifies, where all read the same memory: about as many bytes for each."""
    lengths = segments[:, 1].astype(np.int64)
    middles = 2 * np.cumsum(lengths) - lengths
    owners = middles * ranks // max(1, 2 * int(lengths.sum()))
    chosen: Segments = segments[owners == rank]
    return chosen


class Verifier:
    """Compares bytes that fill `data` in ascending order with the digests of their writers.

    `data` is the whole slot; bytes outside `segments` are not looked at.
    """

    def __init__(self, data: memoryview, segments: Segments, manifest: Manifest) -> None:
        self._data = data
        self._manifest = manifest
        self._segments: list[list[int]] = segments.tolist()
        self._complete = 0  # segments that are there as a whole
        self._hash = xxhash.xxh3_64()  # of the segment after those
        self._at = 0  # all bytes of the segments below it are hashed
        self._fault = ""

    def advance(self, upto: int) -> None:
        """All bytes of the segments below `upto` are there."""
        while self._complete < len(self._segments):
            offset, length, expected = self._segments[self._complete]
            begin = max(self._at, offset)
            self._at = max(begin, min(upto, offset + length))
            self._hash.update(self._data[begin : self._at])
            if self._at < offset + length:
                return

            if self._hash.intdigest() != expected and not self._fault:
                self._fault = self._manifest.damage(offset, length)
            self._hash.reset()
            self._complete += 1

    def finish(self) -> None:
        """All bytes are there. Raises WeightsCorrupt naming the first tensor that differs."""
        self.advance(self._manifest.total_bytes)
        if self._fault:
            raise WeightsCorrupt(self._fault)
