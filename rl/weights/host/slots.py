"""The slot protocol: which slot is written, which are read, and when a version is complete.

A pure state machine over a block of words that all processes share (a mapped file, or private memory when
one process serves its readers over sockets). It neither waits nor locks: **every method runs under the
lock of the block's owner**, so all decisions are atomic and ordered on every architecture.

    slot:    empty ──claim──▶ writing ──commit by every rank──▶ ready ──claim──▶ writing ...
    sequence:  0                odd                              even              odd

* Rank 0 claims; the other ranks find the slot through its version. Versions only grow.
* A draft (`draft_of`) is a version that no reader may lease. Rank 0 looks at its bytes and then names it (`name`): so
  nobody reads a version before the learner has noted what its bytes are.
* `claim` never takes the newest ready slot, nor a leased one. So two slots always hold a complete version.
* `lease` gives the newest ready slot, as long as at most `slots - 2` different slots are leased: hence with
  three slots a claim always finds one, however slow the readers. A reader that would lease one slot too many
  joins the newest version that is leased already, if it is new enough for it, else waits for that lease's end.
  (Two slots: one may be leased, and a claim then waits for it.)
* A lease ends by its holder, with its process (`end_dead`), or explicitly (`end_leases`: a fenced reader).
* `release` compares the sequence number, so bytes overwritten under a lease that was ended are noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rl.weights.channel import WeightsError, label
from rl.weights.host.layout import Segment, Segments
from rl.wire.messages import Version

_NAME_BYTES = 48


def draft_of(n: int) -> Version:
    """Version `n` before it has a name: older than any that a reader asks for."""
    return Version(-1, n)


@dataclass(frozen=True)
class Geometry:
    """Sizes of the shared block; the same in every process that maps it."""

    slots: int
    ranks: int
    segments: int  # byte ranges that one rank may publish per version
    readers: int  # names that may be registered

    @cached_property
    def slot_dtype(self) -> np.dtype[np.void]:
        version = [("sequence", "<u8"), ("timeline", "<i8"), ("n", "<i8")]
        ranks = [("done", "<u8", (self.ranks,)), ("count", "<u8", (self.ranks,))]
        segments = ("segments", "<u8", (self.ranks, self.segments, 3))  # offset, length, digest
        return np.dtype([*version, *ranks, segments])

    @cached_property
    def lease_dtype(self) -> np.dtype[np.void]:
        lease = [("slot", "<i8"), ("sequence", "<u8")]
        reader = [("name", f"S{_NAME_BYTES}"), ("incarnation", "<i8")]
        return np.dtype(lease + reader)

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_dtype.itemsize + self.readers * self.lease_dtype.itemsize


@dataclass(frozen=True)
class Lease:
    row: int
    incarnation: int
    slot: int
    sequence: int
    version: Version


class SlotTable:
    """`spans`: `Manifest.spans()`, the bytes that all ranks of this table together must have written."""

    def __init__(self, block: memoryview | bytearray, geometry: Geometry, spans: npt.NDArray[np.int64]) -> None:
        self.geometry = geometry
        self._spans = spans
        self._slots = np.frombuffer(block, geometry.slot_dtype, geometry.slots)
        leases_at = geometry.slots * geometry.slot_dtype.itemsize
        self._leases = np.frombuffer(block, geometry.lease_dtype, geometry.readers, leases_at)

    def clear(self) -> None:
        """State of a new block; once, by its owner."""
        self._slots[:] = np.zeros((), self.geometry.slot_dtype)
        self._leases[:] = np.zeros((), self.geometry.lease_dtype)
        self._leases["slot"] = -1

    def take_over(self, other: SlotTable) -> None:
        """What is published in another block of the same geometry, for a new block. Readers register anew."""
        self._slots[:] = other._slots

    # ------------------------------------------------------------ writers

    def claim(self, version: Version) -> int | None:
        """Rank 0: the slot to write `version` into; None if there is none now (`blockers` says why)."""
        newest = self.newest()
        if version.timeline >= 0:
            self._check_growth(version)
        if self.writing() is not None:
            return None
        leased = set(self._leases["slot"].tolist())
        free = [i for i in range(self.geometry.slots) if i != newest and i not in leased]
        if not free:
            return None

        slot = min(free, key=lambda i: (self.version(i), i) if self.sequence(i) else (Version(-1, -1), i))
        row = self._slots[slot]
        row["sequence"] += 1  # first: if this process dies here, nobody takes the old bytes for the new version
        row["done"][:] = 0
        row["timeline"] = version.timeline
        row["n"] = version.n
        return slot

    def name(self, draft: Version, version: Version) -> None:
        """Rank 0: the draft, which is ready, is this version from now on. Nothing if a slot holds it already."""
        slots = [slot for slot in range(self.geometry.slots) if self._ready(slot)]
        if any(self.version(slot) == version for slot in slots):
            return
        self._check_growth(version)
        slot = next(slot for slot in slots if self.version(slot) == draft)
        self._slots[slot]["n"] = version.n
        self._slots[slot]["timeline"] = version.timeline

    def give_up_drafts(self) -> None:
        """The writers died: what they had not published is empty again."""
        for slot in range(self.geometry.slots):
            if self.sequence(slot) % 2 or self.version(slot).timeline < 0:
                self._slots[slot]["sequence"] = 0

    def _check_growth(self, version: Version) -> None:
        newest = self.newest()
        if newest is not None and version <= self.version(newest):
            raise WeightsError(f"version {label(version)} after {label(self.version(newest))}: versions only grow")

    def writing(self, version: Version | None = None) -> int | None:
        """The slot that is being written, by rank 0's choice (only if it is for `version`, when given)."""
        for slot in range(self.geometry.slots):
            if self.sequence(slot) % 2 and (version is None or self.version(slot) == version):
                return slot
        return None

    def commit(self, slot: int, rank: int, segments: Iterable[Segment]) -> bool:
        """Rank `rank` has written its byte ranges; true if that made the slot ready.

        Raises WeightsError if the slot is not being written or there are too many ranges. It also does if all ranks are
        done and their ranges overlap or leave a byte of a tensor unwritten; the slot then stays unready.
        """
        row = self._slots[slot]
        if not self.sequence(slot) % 2 or row["done"][rank]:
            raise WeightsError(f"rank {rank} commits slot {slot}, which is not being written by it")
        table = np.array(list(segments), np.uint64).reshape(-1, 3)
        if len(table) > self.geometry.segments:
            raise WeightsError(f"rank {rank} publishes {len(table)} byte ranges, at most {self.geometry.segments} fit")

        row["segments"][rank, : len(table)] = table
        row["count"][rank] = len(table)
        if int(np.count_nonzero(row["done"])) == self.geometry.ranks - 1:
            check_coverage(self.segments(slot), self._spans, f"version {label(self.version(slot))}")

        row["done"][rank] = 1
        if not row["done"].all():
            return False
        row["sequence"] += 1
        return True

    def blockers(self) -> str:
        """Who keeps a claim waiting, for messages."""
        slot = self.writing()
        if slot is not None:
            ranks = np.flatnonzero(self._slots[slot]["done"] == 0).tolist()
            return f"rank {', '.join(map(str, ranks))} to commit version {label(self.version(slot))}"
        rows = self._leases[self._held()]
        held = [f"{self._name(row)} on version {label(self.version(int(row['slot'])))}" for row in rows]
        return f"the lease of {', '.join(held)}" if held else "nobody"

    def progress(self) -> str:
        """What there is to lease and who keeps the writer waiting, for messages."""
        newest = self.newest()
        ready = "none is ready" if newest is None else f"the newest ready is {label(self.version(newest))}"
        return f"{ready}; writer waits for {self.blockers()}"

    # ------------------------------------------------------------ readers

    def register(self, name: str, incarnation: int) -> int:
        """The lease row of reader `name`; what an earlier incarnation held is freed (it was fenced before)."""
        encoded = name.encode()
        if not 0 < len(encoded) <= _NAME_BYTES:
            raise WeightsError(f"reader name {name!r} must have 1 to {_NAME_BYTES} bytes")

        names: list[bytes] = self._leases["name"].tolist()
        try:
            index = names.index(encoded if encoded in names else b"")
        except ValueError:
            raise WeightsError(f"reader {name!r} is one more than the {self.geometry.readers} that fit") from None
        if names[index] and self._leases[index]["incarnation"] > incarnation:
            raise WeightsError(f"reader {name!r}: incarnation {incarnation} was replaced by a later one")
        self._leases[index] = (-1, 0, encoded, incarnation)
        return index

    def unregister(self, row: int, incarnation: int) -> None:
        if self._leases[row]["incarnation"] == incarnation:
            self._leases[row] = (-1, 0, b"", 0)

    def lease(self, row: int, incarnation: int, at_least: Version) -> Lease | None:
        """Lease the newest slot there is to lease; None if it is older than `at_least` (or of an earlier timeline)."""
        entry = self._leases[row]
        if entry["incarnation"] != incarnation or entry["name"] == b"":
            raise WeightsError(f"reader row {row}: incarnation {incarnation} was replaced, it is fenced")
        if entry["slot"] >= 0:
            raise WeightsError(f"reader {self._name(entry)} already holds a lease")

        slot = self._leasable()
        if slot is None or self.version(slot) < at_least:
            return None
        entry["slot"] = slot
        entry["sequence"] = self.sequence(slot)
        return Lease(row, incarnation, slot, self.sequence(slot), self.version(slot))

    def intact(self, lease: Lease) -> bool:
        """Whether the leased bytes are still those of its version."""
        return self.sequence(lease.slot) == lease.sequence

    def release(self, lease: Lease) -> bool:
        """End the lease; false if its bytes were overwritten (only possible after the lease was ended for it)."""
        entry = self._leases[lease.row]
        if entry["incarnation"] == lease.incarnation and entry["sequence"] == lease.sequence:
            entry["slot"] = -1
        return self.intact(lease)

    def segments(self, slot: int, rank: int | None = None) -> Segments:
        """What all ranks, or one of them, wrote into the slot, by offset; a copy."""
        row = self._slots[slot]
        ranks = range(self.geometry.ranks) if rank is None else [rank]
        table: Segments = np.concatenate([row["segments"][r, : int(row["count"][r])] for r in ranks])
        return table[np.argsort(table[:, 0])]

    def segments_of(self, version: Version) -> Segments | None:
        """`segments` of a version that is ready; None if it is not."""
        for slot in range(self.geometry.slots):
            if self._ready(slot) and self.version(slot) == version:
                return self.segments(slot)
        return None

    # ------------------------------------------------------------ leases of the dead

    def end_leases(self, reader: str, incarnation: int) -> None:
        """Free what `reader`, or a reader named `reader-...`, holds in this or an earlier incarnation."""
        for entry in self._leases[self._held()]:
            name = self._name(entry)
            if (name == reader or name.startswith(f"{reader}-")) and entry["incarnation"] <= incarnation:
                self._end(name)

    def end_dead(self, alive: Callable[[int], bool]) -> list[str]:
        """Free what readers hold whose rows are no longer those of the living; returns their names."""
        dead = [self._name(self._leases[row]) for row in self._held().tolist() if not alive(row)]
        for name in dead:
            self._end(name)
        return dead

    # ------------------------------------------------------------ state

    def sequence(self, slot: int) -> int:
        return int(self._slots[slot]["sequence"])

    def version(self, slot: int) -> Version:
        return Version(int(self._slots[slot]["timeline"]), int(self._slots[slot]["n"]))

    def newest(self) -> int | None:
        """The ready slot with the newest version."""
        return max((i for i in range(self.geometry.slots) if self._ready(i)), key=self.version, default=None)

    def leased(self) -> list[int]:
        """Slots under a lease."""
        return sorted(set(self._leases["slot"][self._held()].tolist()))

    def _leasable(self) -> int | None:
        newest = self.newest()
        leased = self.leased()
        if newest is None or newest in leased or len(leased) < max(1, self.geometry.slots - 2):
            return newest
        return max(leased, key=self.version)

    def _ready(self, slot: int) -> bool:
        sequence = self.sequence(slot)
        return sequence > 0 and sequence % 2 == 0

    def _held(self) -> npt.NDArray[np.intp]:
        return np.flatnonzero(self._leases["slot"] >= 0)

    def _name(self, entry: np.void) -> str:
        return bytes(entry["name"]).decode()

    def _end(self, name: str) -> None:
        self._leases["slot"][self._leases["name"] == name.encode()] = -1


def check_coverage(segments: Segments, spans: npt.NDArray[np.int64], what: str) -> None:
    """Raises WeightsError unless the segments cover every span (`Manifest.spans()`) and never overlap."""
    table = segments[segments[:, 1] > 0][:, :2].astype(np.int64)
    starts = table[:, 0]
    ends = table.sum(axis=1)
    if overlap := np.flatnonzero(starts[1:] < ends[:-1]).tolist():
        raise WeightsError(f"{what}: bytes from {starts[overlap[0] + 1]} on were written twice")

    # Segments that touch are one run; each tensor must lie inside a run.
    opens = np.ones(len(starts), bool)
    opens[1:] = starts[1:] != ends[:-1]
    run_starts = starts[opens]
    run_ends = ends[np.roll(opens, -1)]

    for begin, end in spans.tolist():
        run = int(np.searchsorted(run_starts, begin, side="right")) - 1
        if run < 0 or run_ends[run] < end:
            raise WeightsError(
                f"{what}: bytes {begin} to {end} (one tensor) were not wholly written; every rank must commit its rows"
            )
