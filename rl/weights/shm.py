"""Transport `shm`: writer and reader on the mapped segment of `rl.weights.segment`, which describes the file.

The reader's view is the slot itself: nothing is copied until the engine does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import numpy as np

from rl.core.messages import Version
from rl.core.run import RunFile
from rl.weights.base import (
    Manifest,
    Segment,
    WeightsCorrupt,
    WeightsError,
    combined_checksum,
    label,
    load_manifest,
    save_manifest,
    wait_for,
)
from rl.weights.segment import (
    Mapped,
    alive,
    attach,
    check_space,
    create,
    process_started,
    segment_path,
    sweep_stale,
    unlink_segments,
)
from rl.weights.slots import Lease, SlotTable
from rl.weights.verify import Verifier, with_digests

__all__ = ["ShmReader", "ShmWriter", "check_space", "sweep_stale", "unlink_segments"]

_DEAD_CHECK_S = 0.25


class _DeadReaders:
    """Ends the leases of dead processes, at most every quarter of a second of waiting."""

    def __init__(self) -> None:
        self._next = 0.0

    def end(self, table: SlotTable) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _DEAD_CHECK_S
            table.end_dead(alive)


class ShmWriter:
    """See `WeightWriter`. Rank 0 owns the segment."""

    def __init__(self, run: RunFile, rank: int, manifest: Manifest) -> None:
        self._run, self._rank, self._manifest = run, rank, manifest
        self._mapped: Mapped | None = None
        self._dead = _DeadReaders()
        self._slot = -1  # while writing
        self._version = Version(-1, -1)

    def open(self) -> None:
        if self._rank == 0:
            self._mapped = create(self._run, self._manifest)
            save_manifest(self._run.folder, self._run.run_id, self._manifest)
            return
        self._mapped = wait_for(
            lambda: attach(self._run, self._manifest, writable=True),
            self._run.config.timeouts.start_s,
            lambda: f"learner rank {self._rank} waits for rank 0 to make {segment_path(self._run.run_id)}",
        )

    def begin(self, version: Version, deadline_s: float) -> memoryview:
        if self._slot >= 0:
            raise WeightsError(f"rank {self._rank} begins {label(version)} before it committed {label(self._version)}")
        slot = wait_for(
            lambda: self._claim(version) if self._rank == 0 else self._find(version),
            deadline_s,
            lambda: (
                f"learner rank {self._rank} waits for a weight slot for version {label(version)}, "
                + (f"that is for {self._opened().table.blockers()}" if self._rank == 0 else "chosen by rank 0")
            ),
        )
        self._slot, self._version = slot, version
        return self._opened().slot(slot)

    def commit(self, segments: Iterable[Segment]) -> None:
        mapped = self._opened()
        complete = with_digests(mapped.slot(self._slot), segments)
        with mapped.lock() as table:
            table.commit(self._slot, self._rank, complete)
        self._slot = -1

    def checksum(self, version: Version, deadline_s: float) -> int:
        mapped = self._opened()

        def ready() -> np.ndarray | None:
            with mapped.lock() as table:
                return table.segments_of(version)

        segments = wait_for(
            ready,
            deadline_s,
            lambda: f"learner rank {self._rank} waits for {mapped.table.blockers()}, wants version {label(version)}",
        )
        return combined_checksum(segments)

    def end_leases(self, reader: str, incarnation: int) -> None:
        with self._opened().lock() as table:
            table.end_leases(reader, incarnation)

    def close(self) -> None:
        if self._mapped is None:
            return
        if self._rank == 0:
            segment_path(self._run.run_id).unlink(missing_ok=True)
        self._mapped.close()
        self._mapped = None

    def _claim(self, version: Version) -> int | None:
        with self._opened().lock() as table:
            slot = table.claim(version)
            if slot is None:
                self._dead.end(table)
            return slot

    def _find(self, version: Version) -> int | None:
        with self._opened().lock() as table:
            return table.writing(version)

    def _opened(self) -> Mapped:
        if self._mapped is None:
            raise WeightsError(f"the weight writer of rank {self._rank} is not open")
        return self._mapped


class ShmReader:
    """See `WeightReader`. The leased view is the slot itself: nothing is copied until the engine does."""

    def __init__(self, run: RunFile, name: str, incarnation: int) -> None:
        self._run, self._name, self._incarnation = run, name, incarnation
        self._mapped: Mapped | None = None
        self._row = -1
        self._lease: Lease | None = None
        self._segments = np.empty((0, 3), np.uint64)  # of the leased slot, as it was when leased
        self._dead = _DeadReaders()

    @property
    def manifest(self) -> Manifest:
        return self._opened().manifest

    def open(self, deadline_s: float) -> None:
        self._mapped = wait_for(
            self._find, deadline_s, lambda: f"{self._name} waits for learner rank 0 to make its weight slots"
        )
        with self._mapped.lock() as table:
            pid = os.getpid()
            self._row = table.register(self._name, self._incarnation, pid, process_started(pid) or 0)

    def lease(self, at_least: Version, deadline_s: float) -> tuple[Version, memoryview]:
        mapped = self._opened()
        lease = wait_for(lambda: self._try_lease(at_least), deadline_s, lambda: self._waiting(at_least))
        self._lease = lease
        return lease.version, mapped.slot(lease.slot)

    def checksum(self) -> int:
        """As in `WeightReader`; 0 if the slot was overwritten meanwhile, which `release` then tells."""
        mapped, lease = self._held()
        try:
            return Verifier(mapped.slot(lease.slot), self._segments, mapped.manifest).finish()
        except WeightsCorrupt as error:
            with mapped.lock() as table:
                if not table.intact(lease):
                    return 0
            raise WeightsCorrupt(f"{self._name}, version {label(lease.version)}: {error}") from None

    def release(self) -> bool:
        mapped, lease = self._held()
        self._lease = None
        with mapped.lock() as table:
            return table.release(lease)

    def close(self) -> None:
        if self._mapped is None:
            return
        with self._mapped.lock() as table:
            table.unregister(self._row, self._incarnation)
        self._mapped.close()
        self._mapped = self._lease = None

    def _find(self) -> Mapped | None:
        manifest = load_manifest(self._run.folder, self._run.run_id)
        return None if manifest is None else attach(self._run, manifest, writable=False)

    def _try_lease(self, at_least: Version) -> Lease | None:
        with self._opened().lock() as table:
            lease = table.lease(self._row, self._incarnation, at_least)
            if lease is None:
                self._dead.end(table)
            else:
                self._segments = table.segments(lease.slot)
            return lease

    def _waiting(self, at_least: Version) -> str:
        table = self._opened().table
        newest = table.newest()
        there = "none is ready" if newest is None else f"the newest ready is {label(table.version(newest))}"
        return (
            f"{self._name} waits for weights {label(at_least)} or newer; {there}; writer waits for {table.blockers()}"
        )

    def _held(self) -> tuple[Mapped, Lease]:
        if self._lease is None:
            raise WeightsError(f"{self._name} holds no lease")
        return self._opened(), self._lease

    def _opened(self) -> Mapped:
        if self._mapped is None:
            raise WeightsError(f"the weight reader {self._name} is not open")
        return self._mapped
