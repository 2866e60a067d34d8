"""Weights from the learner's ranks to the engines: the layout of the bytes and the two ends of a transport.

A version's weights are one block of `Manifest.total_bytes` bytes, a *slot*; every tensor stands at a fixed
offset in the engine's dtype, so both sides agree on the layout once and exchange bytes only. Each learner
rank writes its own rows (FSDP `Shard(0)`) and publishes a digest per byte range; a reader verifies all of
them. Invariants of every transport:

* a reader is handed only versions that all ranks have committed, the newest one at that moment;
* bytes that changed while they were read are never accepted (`release()` is False, or WeightsCorrupt);
* the writer never waits for a slow reader when there are three slots (`weights.slots`).

Adding a transport is one file with these two protocols and a line in `rl.weights`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import xxhash
from msgspec import Struct

from rl.core.messages import Version
from rl.core.process import WaitExpired

ALIGNMENT = 64  # bytes: a cache line, and the widest vector load
CHUNK_BYTES = 4 << 20  # unit of hashing: large enough that the hash releases the interpreter lock
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
MANIFEST_NAME = "weights.manifest"
_POLL_S = 0.001
_Found = TypeVar("_Found")

Segment = tuple[int, int] | tuple[int, int, int]
"""(offset, length) in bytes of the slot, and the digest of those bytes if the writer has it already."""


class WeightsError(RuntimeError):
    """Weights did not reach an engine as published: one line that says which, and what to do."""


class WeightsCorrupt(WeightsError):
    """Bytes received differ from what the writers published."""


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
    def layout(cls, entries: Iterable[tuple[str, Sequence[int], str]]) -> Manifest:
        """Lay out `(name, shape, dtype)` one after another, each aligned. Raises ValueError for an unknown dtype."""
        tensors: list[TensorSpec] = []
        offset = 0
        for name, shape, dtype in entries:
            if dtype not in ITEM_BYTES:
                raise ValueError(f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(ITEM_BYTES)}")
            nbytes = math.prod(shape) * ITEM_BYTES[dtype]
            tensors.append(TensorSpec(name, tuple(shape), dtype, offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        names = [spec.name for spec in tensors]
        if len(set(names)) != len(names):
            raise ValueError(f"tensor {next(n for n in names if names.count(n) > 1)!r} is listed twice")
        return cls(tuple(tensors), offset)

    def spans(self) -> np.ndarray:
        """(tensors, 2) int64: first byte and one past the last byte of each tensor that is not empty."""
        found = [(spec.offset, spec.offset + spec.nbytes) for spec in self.tensors if spec.nbytes]
        return np.array(found, np.int64).reshape(-1, 2)

    def fingerprint(self) -> int:
        """64 bits that differ between two layouts."""
        return digest(msgspec.msgpack.encode(self))


class _ManifestFile(Struct, frozen=True):
    run_id: str
    manifest: Manifest


def save_manifest(folder: Path, run_id: str, manifest: Manifest) -> None:
    """Write `<folder>/weights.manifest` in one rename."""
    temporary = folder / f"{MANIFEST_NAME}.new"
    temporary.write_bytes(msgspec.msgpack.encode(_ManifestFile(run_id, manifest)))
    temporary.replace(folder / MANIFEST_NAME)


def load_manifest(folder: Path, run_id: str) -> Manifest | None:
    """The manifest that this start of the run wrote; None if there is none yet (an older start's does not count)."""
    try:
        found = msgspec.msgpack.decode((folder / MANIFEST_NAME).read_bytes(), type=_ManifestFile)
    except FileNotFoundError:
        return None
    return found.manifest if found.run_id == run_id else None


class WeightWriter(Protocol):
    """One per learner rank; not thread-safe. Every rank calls `begin` and `commit` once per version, in order."""

    def open(self) -> None:
        """Make (rank 0) or find (other ranks) the slots. Raises WaitExpired if rank 0 does not make them."""
        ...

    def begin(self, version: Version, deadline_s: float) -> memoryview:
        """Writable view of the whole slot that will hold `version`; this rank writes its own rows only.

        Waits for a free slot (never, with three slots); WaitExpired names who holds the slots.
        """
        ...

    def commit(self, segments: Iterable[Segment]) -> None:
        """Publish the byte ranges that this rank wrote. The version is ready when every rank has committed.

        Raises WeightsError if ranges overlap, or if all ranks are done and a tensor is not wholly covered.
        """
        ...

    def checksum(self, version: Version, deadline_s: float) -> int:
        """`combined_checksum` of `version`, once all ranks have committed it. For rank 0, before the next `begin`."""
        ...

    def end_leases(self, reader: str, incarnation: int) -> None:
        """The reader `reader` (or every reader named `reader-...`) of this or an earlier incarnation is dead."""
        ...

    def close(self) -> None: ...


class WeightReader(Protocol):
    """One per tensor-parallel rank of a generator. Its methods may be called from different threads, one at a time."""

    @property
    def manifest(self) -> Manifest:
        """Known once opened."""
        ...

    def open(self, deadline_s: float) -> None:
        """Find the writer. Raises WaitExpired naming what is missing."""
        ...

    def lease(self, at_least: Version, deadline_s: float) -> tuple[Version, memoryview]:
        """The newest complete version, not older than `at_least`, and a read-only view of its bytes.

        The bytes stay as they are until `release()`, unless the writer was told that this reader is dead.
        """
        ...

    def checksum(self) -> int:
        """Verify every byte range against its writer's digest; the `combined_checksum` of what was received.

        Raises WeightsCorrupt naming the tensor.
        """
        ...

    def release(self) -> bool:
        """End the lease. False: the bytes changed while it was held; lease again and read again."""
        ...

    def close(self) -> None: ...


def label(version: Version) -> str:
    """A version in messages: `epoch.n`."""
    return f"{version.epoch}.{version.n}"


def digest(data: bytes | memoryview) -> int:
    """64-bit digest of one byte range: XXH3 of the XXH3 of its chunks (errors, not adversaries)."""
    return chain([xxhash.xxh3_64_intdigest(data[i : i + CHUNK_BYTES]) for i in range(0, len(data), CHUNK_BYTES)])


def chain(chunk_digests: Sequence[int]) -> int:
    """The digest of a range from those of its chunks, in order."""
    if len(chunk_digests) == 1:
        return chunk_digests[0]
    return xxhash.xxh3_64_intdigest(np.array(chunk_digests, "<u8").tobytes())


def combined_checksum(segments: np.ndarray) -> int:
    """One number for a version, the same on both sides: digest over its `(offset, length, digest)` rows by offset."""
    rows = segments[np.argsort(segments[:, 0])]
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(rows, dtype="<u8").tobytes())


def wait_for(attempt: Callable[[], _Found | None], deadline_s: float, waiting: Callable[[], str]) -> _Found:
    """Poll until `attempt` finds something; WaitExpired with the text of `waiting` after `deadline_s`."""
    until = time.monotonic() + deadline_s
    while (found := attempt()) is None:
        if time.monotonic() > until:
            raise WaitExpired(f"{waiting()} ({deadline_s:g} s)")
        time.sleep(_POLL_S)
    return found
