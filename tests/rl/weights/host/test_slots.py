"""The slot protocol under random interleavings of writers with slow, dying and restarting readers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl.weights.channel import WeightsError
from rl.weights.host.layout import Manifest
from rl.weights.host.slots import Geometry, Lease, SlotTable, check_coverage
from rl.wire.messages import Version

RANKS = 2
BYTES = 4  # each rank writes half of a slot, byte by byte
READERS = 3


class Reader:
    def __init__(self, row: int, incarnation: int) -> None:
        self.row = row
        self.incarnation = incarnation
        self.lease: Lease | None = None
        self.seen: list[int] = []


class SlotMachine(RuleBasedStateMachine):
    """Every byte of version n is n, so a torn read shows. `slots` hold the bytes, the table the decisions."""

    slots = 3

    @initialize()
    def begin(self) -> None:
        geometry = Geometry(self.slots, RANKS, segments=1, readers=READERS)
        self.table = SlotTable(bytearray(geometry.nbytes), geometry, np.array([(0, BYTES)]))
        self.table.clear()
        self.data = np.full((self.slots, BYTES), -1)
        self.published = -1
        self.writing: tuple[int, int] | None = None  # slot, version
        self.written = [0] * RANKS
        self.readers: dict[int, Reader] = {}
        self.incarnations = [0] * READERS
        self.zombies: list[Reader] = []  # fenced, but still holding what they read
        for index in range(READERS):
            self.start(index)

    def protected(self) -> set[int]:
        return {reader.lease.slot for reader in self.readers.values() if reader.lease is not None}

    @precondition(lambda self: self.writing is None)
    @rule()
    def claim(self) -> None:
        version = self.published + 1
        slot = self.table.claim(Version(0, version))
        if slot is None:
            assert self.slots < 3, f"a writer with {self.slots} slots waits for {self.table.blockers()}"
            assert self.protected()
            return
        assert slot not in self.protected(), "a leased slot was taken"
        assert self.published < 0 or self.data[slot][0] != self.published, "the newest version was taken"
        self.writing = (slot, version)
        self.written = [0] * RANKS

    @precondition(lambda self: self.writing is not None)
    @rule(rank=st.integers(0, RANKS - 1))
    def write(self, rank: int) -> None:
        assert self.writing is not None
        slot, version = self.writing
        half = BYTES // RANKS
        if self.written[rank] < half:
            self.data[slot, rank * half + self.written[rank]] = version
            self.written[rank] += 1
            if self.written[rank] < half:
                return

            assert self.table.writing(Version(0, version)) == slot
            ready = self.table.commit(slot, rank, [(rank * half, half, version)])
            assert ready == all(count == half for count in self.written)
            if ready:
                self.published = version
                self.writing = None

    @rule()
    def publish(self) -> None:
        """A whole version, or the rest of one, so that random steps reach many versions."""
        if self.writing is None:
            self.claim()
        for rank in range(RANKS):
            while self.writing is not None and self.written[rank] < BYTES // RANKS:
                self.write(rank)

    @rule(index=st.integers(0, READERS - 1))
    def start(self, index: int) -> None:
        """A new incarnation; its predecessor was fenced but may still be holding a lease."""
        if index in self.readers:
            self.zombies.append(self.readers[index])
        self.incarnations[index] += 1
        row = self.table.register(f"generator-{index}", self.incarnations[index])
        self.readers[index] = Reader(row, self.incarnations[index])

    @rule(index=st.integers(0, READERS - 1), lag=st.integers(0, 1))
    def lease(self, index: int, lag: int) -> None:
        reader = self.readers.get(index)
        if reader is None or reader.lease is not None:
            return
        at_least = max(0, self.published - lag)
        lease = self.table.lease(reader.row, reader.incarnation, Version(0, at_least))
        others = {other.lease.slot for other in self.readers.values() if other.lease is not None}
        if lease is None:
            assert self.published < at_least or others, "a complete version was refused without a reason"
            return

        assert at_least <= lease.version.n <= self.published
        if not others:
            assert lease.version.n == self.published, "not the newest, for no reason"
        reader.lease = lease
        reader.seen = []

    @rule(index=st.integers(0, READERS - 1), count=st.integers(1, BYTES))
    def read(self, index: int, count: int) -> None:
        reader = self.readers.get(index)
        if reader is not None and reader.lease is not None:
            self.read_some(reader, count)

    @rule(index=st.integers(0, READERS - 1))
    def release(self, index: int) -> None:
        reader = self.readers.get(index)
        if reader is None or reader.lease is None:
            return
        self.read_some(reader, BYTES)
        assert self.table.release(reader.lease), "a live lease was overwritten"
        assert reader.seen == [reader.lease.version.n] * BYTES
        reader.lease = None

    @rule(index=st.integers(0, READERS - 1), how=st.sampled_from(["alone", "fenced"]))
    def die(self, index: int, how: str) -> None:
        reader = self.readers.pop(index, None)
        if reader is None:
            return
        if how == "fenced":
            self.table.end_leases(f"generator-{index}", reader.incarnation)
            self.zombies.append(reader)  # fenced by mistake: it may yet read on
            return
        self.table.end_dead(lambda row: row != reader.row)

    @rule()
    def zombie_reads(self) -> None:
        """A reader whose lease was ended for it never takes torn bytes for weights."""
        for zombie in self.zombies:
            if zombie.lease is None:
                continue
            self.read_some(zombie, BYTES)
            if self.table.release(zombie.lease):
                assert zombie.seen == [zombie.lease.version.n] * BYTES
            zombie.lease = None
        self.zombies.clear()

    def read_some(self, reader: Reader, count: int) -> None:
        assert reader.lease is not None
        at = len(reader.seen)
        reader.seen += self.data[reader.lease.slot, at : min(BYTES, at + count)].tolist()

    @invariant()
    def newest_is_complete(self) -> None:
        if not hasattr(self, "table"):
            return
        newest = self.table.newest()
        assert (newest is None) == (self.published < 0)
        if newest is not None:
            assert self.table.version(newest).n == self.published
            assert self.data[newest].tolist() == [self.published] * BYTES
            assert self.table.segments(newest)[:, 2].tolist() == [self.published] * RANKS


class TwoSlotMachine(SlotMachine):
    slots = 2


class FourSlotMachine(SlotMachine):
    slots = 4


for machine in (SlotMachine, TwoSlotMachine, FourSlotMachine):
    machine.TestCase.settings = settings(max_examples=80, stateful_step_count=80)
TestThreeSlots = SlotMachine.TestCase
TestTwoSlots = TwoSlotMachine.TestCase
TestFourSlots = FourSlotMachine.TestCase


def table(slots: int = 3, ranks: int = 1, size: int = 64) -> SlotTable:
    geometry = Geometry(slots, ranks, segments=4, readers=4)
    made = SlotTable(bytearray(geometry.nbytes), geometry, np.array([(0, size)]))
    made.clear()
    return made


def put(slots: SlotTable, version: Version, size: int = 64) -> int:
    slot = slots.claim(version)
    assert slot is not None
    assert slots.commit(slot, 0, [(0, size, 7)])
    return slot


def test_sequence_is_odd_while_writing() -> None:
    slots = table(ranks=2)
    slot = slots.claim(Version(0, 0))
    assert slot is not None and slots.sequence(slot) == 1 and slots.newest() is None
    assert not slots.commit(slot, 1, [(32, 32, 0)])
    assert slots.sequence(slot) == 1 and "rank 0 to commit version 0.0" in slots.blockers()
    assert slots.commit(slot, 0, [(0, 32, 0)])
    assert slots.sequence(slot) == 2 and slots.newest() == slot


def test_versions_only_grow_and_timelines_come_first() -> None:
    slots = table()
    put(slots, Version(0, 9))
    with pytest.raises(WeightsError, match=r"version 0\.9 after 0\.9"):
        slots.claim(Version(0, 9))
    put(slots, Version(1, 3))
    newest = slots.newest()
    assert newest is not None and slots.version(newest) == Version(1, 3)
    row = slots.register("generator-0", 0)
    assert slots.lease(row, 0, Version(1, 4)) is None
    lease = slots.lease(row, 0, Version(0, 9))
    assert lease is not None and lease.version == Version(1, 3)


def test_two_slots_name_the_reader_they_wait_for() -> None:
    slots = table(slots=2)
    put(slots, Version(0, 0))
    row = slots.register("generator-3-0", 2)
    slots.lease(row, 2, Version(0, 0))
    put(slots, Version(0, 1))
    assert slots.claim(Version(0, 2)) is None
    assert slots.blockers() == "the lease of generator-3-0 on version 0.0"
    slots.end_leases("generator-3", 1)  # an earlier incarnation: not this one
    assert slots.claim(Version(0, 2)) is None
    slots.end_leases("generator-3", 2)
    assert slots.claim(Version(0, 2)) is not None


def test_three_slots_never_block_however_the_readers_lease() -> None:
    """A second reader joins the version that a slow one holds, or waits: two old versions are never held."""
    slots = table(slots=3)
    slow, quick = (slots.register(f"generator-{i}", 0) for i in range(2))
    put(slots, Version(0, 0))
    held = slots.lease(slow, 0, Version(0, 0))
    put(slots, Version(0, 1))
    assert slots.lease(quick, 0, Version(0, 1)) is None
    joined = slots.lease(quick, 0, Version(0, 0))

    assert held is not None and joined is not None and joined.version == Version(0, 0)
    for n in range(2, 6):
        put(slots, Version(0, n))
    assert slots.release(joined) and slots.release(held)
    newest = slots.lease(quick, 0, Version(0, 1))
    assert newest is not None and newest.version == Version(0, 5)


def test_a_fenced_incarnation_cannot_end_the_lease_of_its_successor() -> None:
    slots = table()
    put(slots, Version(0, 0))
    row = slots.register("generator-0", 0)
    old = slots.lease(row, 0, Version(0, 0))
    assert slots.register("generator-0", 1) == row
    new = slots.lease(row, 1, Version(0, 0))
    assert old is not None and new is not None
    assert slots.release(old)  # its bytes were intact
    slots.unregister(row, 0)
    assert slots.leased() == [new.slot]


def test_end_leases_does_not_match_longer_numbers() -> None:
    slots = table()
    put(slots, Version(0, 0))
    row = slots.register("generator-10-0", 0)
    slots.lease(row, 0, Version(0, 0))
    slots.end_leases("generator-1", 5)
    assert slots.leased()


def test_a_replaced_incarnation_cannot_lease() -> None:
    slots = table()
    put(slots, Version(0, 0))
    row = slots.register("generator-0-0", 0)
    assert slots.register("generator-0-0", 1) == row
    with pytest.raises(WeightsError, match="replaced"):
        slots.lease(row, 0, Version(0, 0))
    with pytest.raises(WeightsError, match="replaced by a later one"):
        slots.register("generator-0-0", 0)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(0, 64)], None),
        ([(0, 10), (10, 54)], None),
        ([(10, 54), (0, 10)], None),
        ([(0, 10), (11, 53)], "not wholly written"),
        ([(0, 20), (10, 54)], "from 10 on were written twice"),
        ([], "not wholly written"),
    ],
)
def test_coverage(segments: list[tuple[int, int]], message: str | None) -> None:
    slots = table()
    slot = slots.claim(Version(0, 0))
    assert slot is not None
    complete = [(offset, length, 0) for offset, length in segments]
    if message is None:
        assert slots.commit(slot, 0, complete)
        return
    with pytest.raises(WeightsError, match=message):
        slots.commit(slot, 0, complete)
    assert slots.newest() is None


def test_coverage_ignores_padding_but_no_tensor() -> None:
    manifest = Manifest.layout([("a", (3,), "float32"), ("b", (5, 2), "bfloat16"), ("none", (0, 4), "float32")])
    assert [spec.offset for spec in manifest.tensors] == [0, 64, 128] and manifest.total_bytes == 128
    ranges = np.array([(0, 12, 1), (64, 8, 1), (72, 12, 1)], np.uint64)
    check_coverage(ranges, manifest.spans(), "version")
    with pytest.raises(WeightsError, match="bytes 64 to 84"):
        check_coverage(ranges[[0, 2]], manifest.spans(), "version")


def test_layout_refuses_what_it_cannot_carry() -> None:
    with pytest.raises(ValueError, match="dtype 'float16'"):
        Manifest.layout([("a", (3,), "float16")])
    with pytest.raises(ValueError, match="'a' is listed twice"):
        Manifest.layout([("a", (3,), "float32"), ("a", (3,), "float32")])
