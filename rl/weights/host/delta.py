"""What changed between two versions of the same bytes: sparse, and to the bit.

    patch, changed = encode(old, new, ranges)     # None where more than `most` of the items changed
    apply(patch, old, ranges)                     # `old` is `new` afterwards

A small step changes a few per cent of the weights in bfloat16, most of them by one unit in the last place. Of each item
that changed a patch has two bytes: how many stood still before it, and by how much its bits differ. Within one sign
that is the distance in units of the last place. It is taken modulo the item's width, so that any bits become any
others: zeros with a sign, infinities and what is no number as well.

A patch is a row of blocks. A block that would be longer than the bytes themselves has those.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 1 << 20  # old and new stay in a core's cache
_FAR = 255  # a gap of so many items or more stands apart
_WIDE = -128  # so does a difference beyond a byte
_HEAD = struct.Struct("<BIIII")  # kind, bytes that follow, changed items, gaps apart, differences apart
_PLAIN, _PACKED, _RAW = range(3)
_UNSIGNED = {2: np.uint16, 4: np.uint32}
_SIGNED = {2: np.int16, 4: np.int32}

Bytes = npt.NDArray[np.uint8]


class Range(NamedTuple):
    """Bytes that hold items of one width."""

    offset: int
    length: int
    width: int  # 2 or 4


class PatchError(ValueError):
    """A patch that does not fit these bytes."""


def encode(old: Bytes, new: Bytes, ranges: Iterable[Range], most: float = 1.0) -> tuple[bytes, int] | None:
    """The patch of all ranges and how many items changed; None as soon as these are more than the share `most`."""
    ranges = list(ranges)
    limit = most * sum(each.length // each.width for each in ranges)
    parts: list[bytes] = []
    total = 0
    for begin, end, width in _blocks(ranges):
        block, changed = _encode_block(old[begin:end], new[begin:end], width)
        parts.append(block)
        total += changed
        if total > limit:
            return None
    return b"".join(parts), total


def apply(patch: bytes | bytearray | memoryview, data: Bytes, ranges: Iterable[Range]) -> None:
    """Make the old bytes the new ones. Raises PatchError, and then some of them may have changed."""
    patch = memoryview(patch)
    at = 0

    try:
        for begin, end, width in _blocks(ranges):
            kind, nbytes, *counts = _HEAD.unpack_from(patch, at)
            at += _HEAD.size + nbytes
            if at > len(patch):
                raise PatchError("it ends within a block")
            _apply_block(kind, patch[at - nbytes : at], counts, data[begin:end], width)
    except (ValueError, IndexError, OverflowError, struct.error, OSError) as error:
        raise PatchError(f"a patch of {len(patch)} bytes does not fit: {error}") from None

    if at != len(patch):
        raise PatchError(f"a patch of {len(patch)} bytes has {len(patch) - at} too many")


def _blocks(ranges: Iterable[Range]) -> Iterator[tuple[int, int, int]]:
    for offset, length, width in ranges:
        for at in range(offset, offset + length, BLOCK_BYTES):
            yield at, min(at + BLOCK_BYTES, offset + length), width


def _encode_block(old: Bytes, new: Bytes, width: int) -> tuple[bytes, int]:
    before = old.view(_UNSIGNED[width])
    after = new.view(_UNSIGNED[width])
    places = _changed(before, after)
    if not len(places):
        return _HEAD.pack(_PLAIN, 0, 0, 0, 0), 0

    gaps = np.diff(places, prepend=-1) - 1
    is_far = gaps >= _FAR
    far = gaps[is_far].astype("<u4")
    near = gaps.astype(np.uint8)
    near[is_far] = _FAR

    differences = (after[places] - before[places]).view(_SIGNED[width])
    small = differences.astype(np.int8)
    is_wide = (small != differences) | (small == _WIDE)
    wide = differences[is_wide]
    small[is_wide] = _WIDE

    plain = b"".join(part.tobytes() for part in (near, small, far, wide))
    packed = _zstd().compress(plain, asbytes=True)
    if min(len(plain), len(packed)) >= len(new):
        return _HEAD.pack(_RAW, len(new), 0, 0, 0) + new.tobytes(), len(places)
    kind, payload = (_PACKED, packed) if len(packed) < len(plain) else (_PLAIN, plain)
    return _HEAD.pack(kind, len(payload), len(places), len(far), len(wide)) + payload, len(places)


def _apply_block(kind: int, payload: memoryview, counts: list[int], data: Bytes, width: int) -> None:
    if kind == _RAW:
        data[:] = np.frombuffer(payload, np.uint8)
        return

    changed, far, wide = counts
    nbytes = 2 * changed + 4 * far + width * wide
    if max(changed, far, wide) > len(data) // width:
        raise PatchError(f"{max(counts)} items of {len(data) // width} changed")
    if kind == _PACKED:
        payload = memoryview(_zstd().decompress(payload, nbytes, asbytes=True))
    if len(payload) != nbytes:
        raise PatchError(f"a block of {len(payload)} bytes instead of {nbytes}")
    if not changed:
        return

    gaps = np.frombuffer(payload, np.uint8, changed).astype(np.int64)
    gaps[gaps == _FAR] = np.frombuffer(payload, "<u4", far, 2 * changed)
    differences = np.frombuffer(payload, np.int8, changed, changed).astype(_SIGNED[width])
    differences[differences == _WIDE] = np.frombuffer(payload, _SIGNED[width], wide, 2 * changed + 4 * far)
    data.view(_UNSIGNED[width])[np.cumsum(gaps + 1) - 1] += differences.view(_UNSIGNED[width])


def _changed(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Which items differ. Eight bytes are compared at once, and only those that differ are looked at more closely."""
    together = 8 // before.itemsize
    whole = len(before) // together * together
    old = before[:whole].view(np.uint64)
    new = after[:whole].view(np.uint64)
    words = np.flatnonzero(old != new)

    inside = np.flatnonzero((old[words] ^ new[words]).view(before.dtype))
    found = words[inside // together] * together + inside % together
    rest = np.flatnonzero(before[whole:] != after[whole:])
    return np.concatenate([found, whole + rest]) if len(rest) else found


@cache
def _zstd() -> Any:
    """pyarrow's, which is imported where a patch is made or read: most processes never do."""
    import pyarrow

    return pyarrow.Codec("zstd", compression_level=1)
