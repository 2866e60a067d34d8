"""What a rank keeps for receivers of other machines: patches from the last few versions to the next ones."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import numpy as np

from rl.config.schema import MOST_CHANGED
from rl.weights.host.delta import Range, encode
from rl.weights.host.layout import Manifest, Segments, combined_checksum

KEPT = 8  # patches: a receiver may skip so many versions
LONGEST = 0.5  # of the bytes that they stand for: all patches together; older ones are forgotten


class _Offered(NamedTuple):
    """A version of this rank's bytes, in its slot."""

    view: memoryview
    segments: Segments
    checksum: int


class _Patch(NamedTuple):
    old: int  # checksums of this rank's bytes before and after
    new: int
    patch: bytes


class Patches:
    """Of one rank. `always`: also where most items changed. Nothing is made before a receiver has asked."""

    def __init__(self, manifest: Manifest, *, always: bool) -> None:
        self._manifest = manifest
        self._most = 1.0 if always else MOST_CHANGED
        self._longest = 2.0 if always else LONGEST
        self._wanted = False
        self._offered: _Offered | None = None
        self._kept: deque[_Patch] = deque(maxlen=KEPT)
        self._thread: threading.Thread | None = None

    def offer(self, view: memoryview, segments: Segments) -> None:
        """This rank has written these bytes. Begins to make a patch, in a thread."""
        before = self._offered
        self._offered = _Offered(view, segments, combined_checksum(segments))
        if self._wanted and before is not None:
            self._thread = threading.Thread(target=self._make, args=(before, self._offered), name="weights.patch")
            self._thread.daemon = True
            self._thread.start()

    def finish(self) -> None:
        """What the patch is made of may be overwritten afterwards."""
        if self._thread is not None:
            self._thread.join()

    def find(self, has: int, wants: int) -> list[bytes] | None:
        """The patches from one version to another, to be applied in turn. None where it is sent whole.

        Raises NotMade while the last one is being made.
        """
        self._wanted = True
        if has and self._thread is not None and self._thread.is_alive():
            raise NotMade

        found: list[bytes] = []
        for old, new, patch in reversed(list(self._kept)):
            if wants != has and new == wants:
                found.insert(0, patch)
                wants = old
        return found if wants == has else None

    def _make(self, old: _Offered, new: _Offered) -> None:
        if np.array_equal(old.segments[:, :2], new.segments[:, :2]):
            ranges = ranges_of(self._manifest, new.segments)
            made = encode(np.frombuffer(old.view, np.uint8), np.frombuffer(new.view, np.uint8), ranges, self._most)
            if made is not None:
                self._kept.append(_Patch(old.checksum, new.checksum, made[0]))

        longest = self._longest * int(new.segments[:, 1].sum())
        while len(self._kept) > 1 and sum(len(each.patch) for each in self._kept) > longest:
            self._kept.popleft()


class NotMade(Exception):
    """Ask again."""


def ranges_of(manifest: Manifest, segments: Segments) -> list[Range]:
    """What one rank wrote, as a patch goes over it."""
    return [Range(begin, end - begin, width) for begin, end, width in manifest.runs(segments, mixed=False)]
