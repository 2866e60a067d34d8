"""Channel `shm`: sender and receiver on the mapped file of `rl.weights.host.shm_file`."""

from __future__ import annotations

from collections.abc import Iterable

from rl.weights.channel import Channel, Entry, Wait, WeightsCorrupt, WeightsError
from rl.weights.host.ends import HostReceiver, HostSender, wait_for
from rl.weights.host.layout import Segments, combined_checksum, digests, part_of
from rl.weights.host.shm_file import SlotsFile, made_bytes, remove_slots, slots_path
from rl.weights.host.slots import Lease
from rl.wire.messages import Version
from rl.wire.page_lock import PageLock
from rl.wire.run import RunFile


class ShmSender(HostSender):
    """Rank 0 owns the file, also one that an earlier incarnation has made: receivers keep what they have mapped.

    A file that was removed meanwhile is made again, with what was published, before a version is begun and when a
    receiver has died. Whoever has mapped the old one goes over to it with the next version.
    """

    _slots: SlotsFile | None = None

    def __init__(self, run: RunFile, rank: int, entries: Iterable[Entry], wait: Wait | None = None) -> None:
        super().__init__(run, rank, entries, wait)
        self._page_lock = PageLock(run.learner_device if run.config.learner.kind != "simulated" else "cpu")

    def open(self) -> None:
        if self.rank == 0:
            self._slots = SlotsFile.adopt(self.run, self._manifest) or SlotsFile.create(self.run, self._manifest)
            return

        found = wait_for(
            lambda: SlotsFile.attach(self.run, writable=True),
            self.run.config.timeouts.start_s,
            lambda: f"learner rank {self.rank} waits for rank 0 to make {slots_path(self.run.run_id)}",
            progress=lambda: made_bytes(self.run),
        )
        self._slots = found
        self._check_layout(found.manifest)

    def begin(self, version: Version, deadline_s: float) -> memoryview:
        view = super().begin(version, deadline_s)
        self._page_lock.add(view)
        return view

    def receiver_died(self, name: str, incarnation: int) -> None:
        super().receiver_died(name, incarnation)
        self._go_over()

    def _find_slot(self, version: Version) -> int | None:
        self._go_over()
        return super()._find_slot(version)

    def _go_over(self) -> None:
        """From a file that was removed to one that is there; not while a version is being written."""
        before = self._slots
        if before is None or before.is_there:
            return

        if self.rank > 0:
            found = SlotsFile.attach(self.run, writable=True)
        else:
            with before.lock() as table:
                is_free = table.writing() is None
            # Without the lock, which nobody may have for minutes: rank 0 alone begins a version, or names one.
            found = SlotsFile.create(self.run, self._manifest, before) if is_free else None

        if found is not None:
            self._page_lock.close()
            before.close()
            self._slots = found

    def close(self) -> None:
        self._page_lock.close()
        if self.rank == 0 and self._slots is not None:
            remove_slots(self.run.run_id)
        super().close()


class ShmReceiver(HostReceiver):
    """The leased view is the slot itself: nothing is copied until the engine does."""

    _slots: SlotsFile | None = None
    _made = 0  # of the file, as its maker said last
    _row: int
    _lease: Lease | None = None
    _segments: Segments  # of the leased slot, as they were when it was leased

    def open(self, deadline_s: float) -> None:
        self._slots = wait_for(
            self._attach,
            deadline_s,
            lambda: f"{self.name} waits for {self._maker} to make its weight slots",
            progress=self._advance_with_maker,
        )
        self._manifest = self._slots.manifest
        self._row = self._slots.register(self.name, self.incarnation)

    @property
    def _maker(self) -> str:
        """Who makes the file, in messages."""
        return "learner rank 0"

    def _attach(self) -> SlotsFile | None:
        return SlotsFile.attach(self.run, writable=False, advance=self._count)

    def _count(self, nbytes: int) -> None:
        self.progress += nbytes

    def _advance_with_maker(self) -> int:
        """`progress`: who waits for the file advances as its maker does."""
        now = made_bytes(self.run)
        self._count(max(0, now - self._made))
        self._made = now
        return self.progress

    def _close(self) -> None:
        if self._slots is not None:
            with self._slots.lock() as table:
                table.unregister(self._row, self.incarnation)
            self._slots.close()
        self._slots = self._lease = None

    def _acquire(self, at_least: Version, deadline_s: float) -> tuple[Version, memoryview]:
        def attempt() -> Lease | None:
            slots = self._go_over()
            with slots.lock() as table:
                lease = table.lease(self._row, self.incarnation, at_least)
                if lease is not None:
                    self._segments = table.segments(lease.slot)
                self.progress += len(table.leased())
            if lease is None:
                slots.end_dead()
            return lease

        lease = wait_for(
            attempt,
            deadline_s,
            lambda: self._waiting(at_least, self._opened().table.progress()),
            progress=lambda: self.progress,
        )
        self._lease = lease
        return lease.version, self._opened().view(lease.slot)

    def _go_over(self) -> SlotsFile:
        """The file: another one by now, if it was removed and made again."""
        before = self._opened()
        if before.is_there or (found := self._attach()) is None:
            return before
        self._page_lock.close()
        before.close()
        self._slots = found
        self._row = found.register(self.name, self.incarnation)
        return found

    def _verify(self) -> int:
        """The ranks of one engine read the same bytes, and each verifies its part: all have to, before any loads."""
        slots = self._opened()
        assert self._lease is not None
        view = slots.view(self._lease.slot)
        ranks = self.run.config.generator.tensor_parallel
        own = part_of(self._segments, int(self.name.rpartition("-")[2]), ranks) if ranks > 1 else self._segments
        damage = ""
        for (offset, length, found), expected in zip(
            digests(view, own[:, :2].tolist()), own[:, 2].tolist(), strict=True
        ):
            self.progress += length
            if found != expected and not damage:
                damage = slots.manifest.damage(offset, length)

        if not damage:
            return combined_checksum(self._segments)

        with slots.lock() as table:
            if not table.intact(self._lease):
                return 0
        raise WeightsCorrupt(damage)

    def _end(self) -> bool:
        assert self._lease is not None
        with self._opened().lock() as table:
            return table.release(self._lease)

    def _opened(self) -> SlotsFile:
        if self._slots is None:
            raise WeightsError(f"the weight receiver {self.name} is not open")
        return self._slots


SHM = Channel(ShmSender, ShmReceiver)
