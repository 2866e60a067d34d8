"""Check received bytes against the writers' digests, as they arrive, while they are still in the cache."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

from rl.weights.base import Manifest, Segment, WeightsCorrupt, combined_checksum, digest

CHUNK_BYTES = 256 << 10  # copied, then hashed: fits the second-level cache beside its source


class Verifier:
    """Follows bytes that fill `data` in ascending order.

    `advance(upto)` says that all bytes of `segments` below `upto` are there. `segments` is
    `SlotTable.segments()`: (ranges, 3) of offset, length, digest, by offset.
    """

    def __init__(self, data: memoryview, segments: np.ndarray, manifest: Manifest) -> None:
        self._data, self._manifest, self._table = data, manifest, segments
        self._segments: list[list[int]] = segments.tolist()
        self._index = 0  # first segment that is not verified yet
        self._done = 0  # bytes of it that are hashed
        self._hash = xxhash.xxh3_64()

    def advance(self, upto: int) -> None:
        """Raises WeightsCorrupt naming the tensor of the first range that differs."""
        while self._index < len(self._segments):
            offset, length, expected = self._segments[self._index]
            end = min(offset + length, upto)
            if end > offset + self._done:
                self._hash.update(self._data[offset + self._done : end])
                self._done = end - offset
            if self._done < length:
                return
            if self._hash.intdigest() != expected:
                raise WeightsCorrupt(
                    f"{self._tensor_at(offset)}: {length} bytes at offset {offset} differ from what the learner wrote"
                )
            self._hash.reset()
            self._index, self._done = self._index + 1, 0

    def finish(self) -> int:
        """Verify what is left; the combined checksum."""
        while self._index < len(self._segments):
            offset, length, _ = self._segments[self._index]
            done = offset + self._done
            self.advance(min(done + CHUNK_BYTES, offset + length))
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
