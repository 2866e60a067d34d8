"""Transport `shm`: writer and reader on the mapped file of `rl.weights.shm_file`.

The reader's view is the slot itself: nothing is copied until the engine does.
"""

from __future__ import annotations

import os

import numpy as np

from rl.weights.layout import Verifier, WeightsCorrupt, WeightsError, combined_checksum
from rl.weights.shm_file import SlotsFile, process_started, remove_slots, slots_path
from rl.weights.slots import Lease
from rl.weights.transport import WeightReader, WeightWriter, wait_for
from rl.wire.messages import Version
from rl.wire.run import RunFile


class ShmWriter(WeightWriter):
    """Rank 0 owns the file, also one that an earlier incarnation has made: readers keep what they have mapped."""

    def open(self) -> None:
        if self._rank == 0:
            self._slots = SlotsFile.adopt(self._run, self._manifest) or SlotsFile.create(self._run, self._manifest)
            return

        found = wait_for(
            lambda: SlotsFile.attach(self._run, writable=True),
            self._run.config.timeouts.start_s,
            lambda: f"learner rank {self._rank} waits for rank 0 to make {slots_path(self._run.run_id)}",
        )
        self._slots = found
        self._check_layout(found.manifest)

    def close(self) -> None:
        if self._rank == 0 and self._slots is not None:
            remove_slots(self._run.run_id)
        super().close()


class ShmReader(WeightReader):
    """The leased view is the slot itself: nothing is copied until the engine does."""

    def __init__(self, run: RunFile, name: str, incarnation: int) -> None:
        super().__init__(run, name, incarnation)
        self._slots: SlotsFile | None = None
        self._row = -1
        self._lease: Lease | None = None
        self._segments = np.empty((0, 3), np.uint64)  # of the leased slot, as they were when it was leased

    def open(self, deadline_s: float) -> None:
        self._slots = wait_for(
            lambda: SlotsFile.attach(self._run, writable=False),
            deadline_s,
            lambda: f"{self._name} waits for learner rank 0 to make its weight slots",
        )
        self._manifest = self._slots.manifest
        pid = os.getpid()
        with self._slots.lock() as table:
            self._row = table.register(self._name, self._incarnation, pid, process_started(pid) or 0)

    def close(self) -> None:
        if self._slots is None:
            return
        with self._slots.lock() as table:
            table.unregister(self._row, self._incarnation)
        self._slots.close()
        self._slots = self._lease = self._leased = self._manifest = None

    def _acquire(self, at_least: Version, deadline_s: float) -> tuple[Version, memoryview]:
        slots = self._opened()

        def attempt() -> Lease | None:
            with slots.lock() as table:
                lease = table.lease(self._row, self._incarnation, at_least)
                if lease is not None:
                    self._segments = table.segments(lease.slot)
                self.progress += len(table.leased())
            if lease is None:
                slots.end_dead()
            return lease

        lease = wait_for(
            attempt,
            deadline_s,
            lambda: self._waiting(at_least, slots.table.progress()),
            progress=lambda: self.progress,
        )
        self._lease = lease
        return lease.version, slots.view(lease.slot)

    def _verify(self) -> int:
        slots = self._opened()
        assert self._lease is not None
        verifier = Verifier(slots.view(self._lease.slot), self._segments, slots.manifest)

        try:
            for offset, length, _ in self._segments.tolist():
                verifier.advance(offset + length)
                self.progress += length
            verifier.finish()

        except WeightsCorrupt:
            with slots.lock() as table:
                if not table.intact(self._lease):
                    return 0
            raise
        return combined_checksum(self._segments)

    def _end(self) -> bool:
        assert self._lease is not None
        with self._opened().lock() as table:
            return table.release(self._lease)

    def _opened(self) -> SlotsFile:
        if self._slots is None:
            raise WeightsError(f"the weight reader {self._name} is not open")
        return self._slots
