"""Channel `tcp`: between machines. Each machine fetches a version once, into shared memory, for all of its engines.

    ranks of the learner, each in private memory            a machine: slots in shared memory, as those of `shm`
    rank 0: which version, who holds it (`frames`)  ◀──▶    whoever takes first and gets the machine's lock fetches:
    rank r: a patch, or its bytes, in bulk          ──▶     base + patch = new version, verified, committed
                                                            everybody leases it there, and verifies it again

No process is a machine's receiver for good: the lock goes with its holder's life, and the next that takes begins anew.
A rank sends patches (`patches`) to another machine that has one of its last versions, and else its bytes as they are.
Versions are told apart by checksums of their bytes. So a patch can only meet the bytes that it was made for, and what
comes out is compared with the sender's digests before anybody may lease it. If it differs, the bytes are fetched whole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import zmq

from rl.weights.channel import Channel, Entry, Wait, WeightsCorrupt, WeightsError, label
from rl.weights.host import wire
from rl.weights.host.bulk import BulkReader, BulkServer, Wanted, chunks
from rl.weights.host.delta import PatchError, apply
from rl.weights.host.ends import Slots, wait_for
from rl.weights.host.frames import ASK_AGAIN_S, SILENCE_S, FramesSender, PrivateSlots, granted, persist, pieces
from rl.weights.host.layout import Manifest, Segment, Segments, Verifier, combined_checksum
from rl.weights.host.patches import NotMade, Patches, ranges_of
from rl.weights.host.shm import ShmReceiver
from rl.weights.host.shm_file import SlotsFile, making
from rl.wire.messages import Version
from rl.wire.process import WaitExpired
from rl.wire.run import RunFile

_SAY_S = 1.0
_TICK_MS = 50


class TcpSender(FramesSender):
    _bulk: BulkServer | None = None

    def __init__(self, run: RunFile, rank: int, entries: Iterable[Entry], wait: Wait | None = None) -> None:
        super().__init__(run, rank, entries, wait)
        self._mode = run.config.weights.delta
        self._patches = Patches(self._manifest, always=self._mode == "always")

    def open(self) -> None:
        self._bulk = BulkServer(self.run, self.rank)
        super().open()

    def begin(self, version: Version, deadline_s: float) -> memoryview:
        self._patches.finish()
        return super().begin(version, deadline_s)

    def stats(self) -> dict[str, float]:
        slots = self._slots
        return dict(slots.fetched) if isinstance(slots, PrivateSlots) else {}

    def parts(self, reader: str, ask: wire.AskParts) -> wire.Answer:
        assert self._bulk is not None
        if not 0 <= ask.slot < self.run.config.weights.slots:
            raise WeightsError(f"there is no slot {ask.slot}")

        found: list[bytes] | None = None
        if self._mode == "always" or (self._mode == "auto" and ask.machine != self.run.host):
            try:
                found = self._patches.find(ask.has, ask.wants)
            except NotMade:
                return wire.NotYet(f"rank {self.rank} to make a patch")

        sources: Sequence[bytes | memoryview] = [self._opened().view(ask.slot)] if found is None else found
        parcel = self._bulk.grant(reader, sources)
        return wire.Parts(parcel, None if found is None else [len(patch) for patch in found])

    def receiver_died(self, name: str, incarnation: int) -> None:
        super().receiver_died(name, incarnation)
        if self._bulk is not None:
            self._bulk.revoke(name, incarnation)

    def close(self) -> None:
        if self._bulk is not None:
            self._bulk.stop()
        self._bulk = None
        super().close()

    def _publish(self, slot: int, segments: list[Segment]) -> None:
        table = np.array(segments, np.uint64).reshape(-1, 3)
        self._patches.offer(self._opened().view(slot), table[np.argsort(table[:, 0])])
        super()._publish(slot, segments)

    def _opened(self) -> Slots:
        if self._bulk is not None and self._bulk.failed is not None:
            raise WeightsError(self._bulk.failed)
        return super()._opened()


class _Part:
    """What one rank wrote into a slot, on its way to the slot of this machine."""

    def __init__(
        self, rank: int, table: Segments, answer: wire.Parts, base: memoryview, into: memoryview, manifest: Manifest
    ) -> None:
        """It is asked for, and what it is a patch of is copied meanwhile."""
        self.rank = rank
        self.nbytes = 0  # that came
        self.damage = ""
        self._table = table
        self._into = into
        self._manifest = manifest
        self._patches = None if answer.patches is None else [bytearray(nbytes) for nbytes in answer.patches]
        self.kind = "dense" if self._patches is None else "sparse"

        places = [into] if self._patches is None else [memoryview(patch) for patch in self._patches]
        self.reader = BulkReader(answer.parcel, self._wanted(), places)
        if self._patches is not None:
            for begin, end, _ in manifest.runs(table):
                into[begin:end] = base[begin:end]

    def receive(self) -> int:
        """Take one message, which is there; returns how many bytes it brought."""
        nbytes = self.reader.receive()
        self.nbytes += nbytes
        return nbytes

    def is_right(self) -> bool:
        """Whether it is what the rank wrote, now that all of it has come; `damage` says what is not."""
        try:
            for patch in self._patches or ():
                apply(patch, np.frombuffer(self._into, np.uint8), ranges_of(self._manifest, self._table))
            Verifier(self._into, self._table, self._manifest).finish()
        except (PatchError, WeightsCorrupt) as error:
            self.damage = str(error)
        return not self.damage

    def _wanted(self) -> Iterator[Wanted]:
        if self._patches is None:
            for offset, length in pieces(self._table, self._manifest):
                yield 0, offset, length
        for source, patch in enumerate(self._patches or ()):
            yield from chunks(source, len(patch))


class TcpReceiver(ShmReceiver):
    _ranks: Sequence[wire.Connection] = ()
    _seen = 0  # of what is fetched on this machine

    @property
    def _silence_s(self) -> float:
        return min(SILENCE_S, self.run.config.weights.deadline_s)

    def open(self, deadline_s: float) -> None:
        ranks = range(self.run.config.learner.ranks)
        self._ranks = [wire.Connection(self.run, rank, self.name, self.incarnation) for rank in ranks]
        layout = self._ranks[0].ask(wire.Describe(), wire.Layout, deadline_s)
        assert layout is not None
        self._theirs = layout.manifest
        super().open(deadline_s)
        if self.manifest != self._theirs:
            raise WeightsError(f"the weight slots of run {self.run.run_id} on this machine have another layout")

    @property
    def _maker(self) -> str:
        return f"another process of {self.run.host}"

    def _attach(self) -> SlotsFile | None:
        attach = partial(SlotsFile.attach, self.run, writable=True, owned=False, advance=self._count)
        found = attach()
        if found is None:
            with making() as is_alone:
                if is_alone:
                    found = attach() or SlotsFile.create(self.run, self._theirs, advance=self._count)
        return found

    def _close(self) -> None:
        for connection in self._ranks:
            connection.close()
        self._ranks = ()
        super()._close()

    def _acquire(self, at_least: Version, deadline_s: float) -> tuple[Version, memoryview]:
        first = self._ranks[0]
        try:
            persist(self, lambda: self._attempt(at_least, deadline_s), deadline_s)
        finally:
            first.post(wire.Release())  # else rank 0 would keep the slot until its own deadline
        return super()._acquire(at_least, deadline_s)

    def _attempt(self, at_least: Version, deadline_s: float) -> bool | None:
        """Whether this machine has the newest version; None: try again."""
        first = self._ranks[0]
        found = granted(first, self, at_least, deadline_s, lambda: self._waiting(at_least, first.not_yet.waiting))
        slots = self._go_over()
        if _has(slots, found.version):
            return True
        if slots.begin_fetch():
            try:
                return _has(slots, found.version) or self._fetch(slots, found, deadline_s)
            finally:
                slots.end_fetch()

        first.post(wire.Release())
        waiting = f"{self.name} waits for another process of {self.run.host} to fetch weights {label(found.version)}"
        wait_for(lambda: self._is_over(slots), deadline_s, lambda: waiting, ASK_AGAIN_S, lambda: self.progress)
        return _has(slots, found.version) or None

    def _is_over(self, slots: SlotsFile) -> bool | None:
        """Whether the fetch of another process has ended, in one way or another."""
        fetched = int(slots.head["fetched_bytes"][0])
        self.progress += max(0, fetched - self._seen)
        self._seen = fetched
        if not slots.begin_fetch():
            return None
        slots.end_fetch()
        return True

    def _fetch(self, slots: SlotsFile, found: wire.Granted, deadline_s: float) -> bool | None:
        """Bring a version into a slot of this machine. None if it was overwritten meanwhile."""
        tables = [np.array(rows, np.uint64).reshape(-1, 3) for rows in found.segments]
        with slots.lock() as table:
            table.give_up_drafts()  # of a process that died
            newest = table.newest()
            has = [0 if newest is None else combined_checksum(table.segments(newest, r)) for r in range(len(tables))]
        base = slots.view(newest or 0)  # which nobody overwrites: a claim never takes the newest
        slot = self._claim(slots, found.version, deadline_s)
        brings = partial(self._bring, tables, base=base, slot=slot, found=found, slots=slots)

        counts: Counter[str] = Counter()
        wrong = brings(dict(enumerate(has)), counts)
        if wrong:
            wrong = brings(dict.fromkeys(wrong, 0), counts)

        released = self._ranks[0].ask(wire.Release(counts), wire.Released, self._silence_s)
        if released is None or not released.intact:
            return None
        if wrong:
            raise WeightsCorrupt(f"{self.name}, version {label(found.version)}: {next(iter(wrong.values()))}")

        with slots.lock() as table:
            for rank, rows in enumerate(found.segments):
                table.commit(slot, rank, rows)
        return True

    def _claim(self, slots: SlotsFile, version: Version, deadline_s: float) -> int:
        def attempt() -> int | None:
            with slots.lock() as table:
                claimed = table.claim(version)
                self.progress += len(table.leased())  # their loads advance, or end
            slots.end_dead()
            return claimed

        def waiting() -> str:
            return f"{self.name} waits for a slot for weights {label(version)}, that is for {slots.table.blockers()}"

        return wait_for(attempt, deadline_s, waiting, progress=lambda: self.progress)

    def _bring(
        self,
        tables: Sequence[Segments],
        has: Mapping[int, int],
        counts: Counter[str],
        *,
        base: memoryview,
        slot: int,
        found: wire.Granted,
        slots: SlotsFile,
    ) -> dict[int, str]:
        """Fetch what these ranks wrote, of which this machine `has` what has this checksum; says which came out wrong.

        Raises WaitExpired naming the ranks that send nothing that is genuine.
        """
        parts: list[_Part] = []
        try:
            for rank, checksum in has.items():
                answer = self._ask_parts(rank, found.slot, checksum, combined_checksum(tables[rank]))
                parts.append(_Part(rank, tables[rank], answer, base, slots.view(slot), slots.manifest))
            self._receive(parts, found, slots)
        finally:
            for part in parts:
                part.reader.close()

        wrong = {}
        for part in parts:
            counts.update({part.kind: 1, f"{part.kind}_bytes": part.nbytes})
            if not part.is_right():
                wrong[part.rank] = part.damage
            self._advance(slots, 1)
        return wrong

    def _ask_parts(self, rank: int, slot: int, has: int, wants: int) -> wire.Parts:
        connection = self._ranks[rank]
        return wait_for(
            lambda: connection.ask(wire.AskParts(self.run.host, slot, has, wants), wire.Parts, self._silence_s),
            self.run.config.weights.deadline_s,
            lambda: f"{self.name} waits for {connection.not_yet.waiting}",
            ASK_AGAIN_S,
        )

    def _receive(self, parts: Sequence[_Part], found: wire.Granted, slots: SlotsFile) -> None:
        poller = zmq.Poller()
        for part in parts:
            poller.register(part.reader.socket, zmq.POLLIN)

        heard = said = time.monotonic()
        is_late = False
        while waiting := [part for part in parts if not part.reader.fetched]:
            ready = dict(poller.poll(_TICK_MS))
            nbytes = sum(part.receive() for part in parts if part.reader.socket in ready)
            self._advance(slots, nbytes)

            now = time.monotonic()
            if now > said + _SAY_S:  # to rank 0, which ends the leases of the silent
                said = now
                self._ranks[0].post(wire.Fetch(found.slot, 0, 0))

            if nbytes:
                heard = now
                is_late = False
            elif now > heard + self._silence_s:
                if is_late:
                    ranks = ", ".join(str(part.rank) for part in waiting)
                    raise WaitExpired(f"{self.name} waits for learner rank {ranks} to send {label(found.version)}")
                heard = now
                is_late = True
                for part in waiting:
                    part.reader.ask_again()

    def _advance(self, slots: SlotsFile, nbytes: int) -> None:
        """Who waits for this fetch sees it as well."""
        self._count(nbytes)
        slots.head["fetched_bytes"] += nbytes


def _has(slots: SlotsFile, version: Version) -> bool:
    with slots.lock() as table:
        newest = table.newest()
        return newest is not None and table.version(newest) >= version


TCP = Channel(TcpSender, TcpReceiver)
