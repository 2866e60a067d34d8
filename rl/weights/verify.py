"""Hash bytes while they are copied, and check received bytes against the writers' digests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

from rl.weights.base import CHUNK_BYTES, Manifest, Segment, WeightsCorrupt, chain, combined_checksum, digest


class RangeDigest:
    """`digest(data[begin:end])` of bytes that become available in ascending order."""

    def __init__(self, data: memoryview, begin: int, end: int) -> None:
        self._data, self._at, self._end = data, begin, end
        self._chunks: list[int] = []

    def advance(self, upto: int) -> bool:
        """All bytes below `upto` are there; true once that is the whole range."""
        while self._at < self._end:
            stop = min(self._at + CHUNK_BYTES, self._end)
            if stop > upto:
                return False
            self._chunks.append(xxhash.xxh3_64_intdigest(self._data[self._at : stop]))
            self._at = stop
        return True

    def result(self) -> int:
        assert self._at == self._end
        return chain(self._chunks)


class Verifier:
    """Follows bytes that fill `data` in ascending order.

    `segments` is `SlotTable.segments()`: (ranges, 3) of offset, length, digest, by offset.
    """

    def __init__(self, data: memoryview, segments: np.ndarray, manifest: Manifest) -> None:
        self._manifest, self._table = manifest, segments
        self._rows: list[list[int]] = segments.tolist()
        self._digests = [RangeDigest(data, offset, offset + length) for offset, length, _ in self._rows]
        self._next = 0  # first range that is not complete

    def advance(self, upto: int) -> None:
        """All bytes of the segments below `upto` are there."""
        while self._next < len(self._digests) and self._digests[self._next].advance(upto):
            self._next += 1

    def finish(self) -> int:
        """All bytes are there: the combined checksum. Raises WeightsCorrupt naming the first tensor that differs."""
        for (offset, length, expected), range_digest in zip(self._rows, self._digests, strict=True):
            range_digest.advance(offset + length)
            if range_digest.result() != expected:
                raise WeightsCorrupt(
                    f"{self._tensor_at(offset)}: {length} bytes at offset {offset} differ from what the learner wrote"
                )
        return combined_checksum(self._table)

    def _tensor_at(self, offset: int) -> str:
        inside = [t.name for t in self._manifest.tensors if t.offset <= offset < t.offset + t.nbytes]
        return f"tensor {inside[0]!r}" if inside else "padding"


def with_digests(view: memoryview, segments: Iterable[Segment]) -> list[tuple[int, int, int]]:
    """Segments of a commit, digests added where the writer did not compute them while copying."""
    complete = []
    for offset, length, *known in segments:
        complete.append((offset, length, known[0] if known else digest(view[offset : offset + length])))
    return complete
