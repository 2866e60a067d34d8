"""Which bytes every published version has: a file of the run, so that a learner that was killed can go on in place.

The next incarnation begins at a checkpoint and trains again what came after it. A version whose bytes come out as they
were keeps its timeline: the generators have it already and notice nothing. From the first one that comes out
otherwise on, all versions are new and so is their timeline. Where a channel knows no checksum, every version that is
trained again counts as another one.

`<run>/versions.jsonl` has a line for every version, written before a generator can have it:
{"timeline", "n", "checksum"}. Of lines with the same n the last counts, and a new timeline ends what was known from
its first n on.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rl.config.damage import RESUME, reading
from rl.wire.messages import Version


class _Line(msgspec.Struct, frozen=True):
    timeline: int
    n: int
    checksum: int | None


class Publications:
    """`timeline`: of a run that has published nothing yet."""

    def __init__(self, folder: Path, timeline: int) -> None:
        self.timeline = timeline
        self.newest = -1
        """The newest version of this timeline; -1 before the first."""
        self._checksums: dict[int, int | None] = {}
        self._path = folder / "versions.jsonl"

        if not self._path.exists():
            return
        # What an earlier incarnation wrote. Of a version whose line was begun and not ended no generator knows.
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        with reading(self._path, RESUME):
            for line in content[:whole].splitlines():
                self._note(msgspec.json.decode(line, type=_Line))
        os.truncate(self._path, whole)

    def add(self, n: int, checksum: int | None, *, anew: bool = False) -> Version:
        """Version `n` has these bytes. In a new timeline, if it had others before, if nobody can say, or `anew`."""
        if anew or checksum is None or n not in self._checksums or self._checksums[n] != checksum:
            line = _Line(self.timeline + (n in self._checksums), n, checksum)
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
            self._note(line)
        return Version(self.timeline, n)

    def _note(self, line: _Line) -> None:
        if line.timeline != self.timeline:
            self._checksums = {n: checksum for n, checksum in self._checksums.items() if n < line.n}
        self.timeline = line.timeline
        self.newest = line.n
        self._checksums[line.n] = line.checksum
