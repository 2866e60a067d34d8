"""The two ends of a weight transport: a writer on each rank of the learner, a reader on each rank of an engine.

What every transport has in common: who claims which slot, who waits for whom, what is published, verified and refused.
A transport adds where the slots are (`Slots`) and how a reader comes to the bytes. Invariants:

* a reader is handed only versions that all ranks have committed, the newest one at that moment;
* bytes that changed while they were read are never accepted (`release()` is False, or WeightsCorrupt);
* the writer never waits for a slow reader when there are three slots (`weights.slots`).

A new transport is one file with subclasses of `WeightWriter` and `WeightReader`, and a line in `rl.weights`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from rl.weights.layout import (
    Manifest,
    Segment,
    Segments,
    WeightsCorrupt,
    WeightsError,
    combined_checksum,
    digest,
    label,
)
from rl.weights.slots import Geometry, SlotTable
from rl.wire.messages import Version
from rl.wire.process import WaitExpired
from rl.wire.run import RunFile

_Found = TypeVar("_Found")
_POLL_S = 0.001


def wait_for(
    attempt: Callable[[], _Found | None],
    deadline_s: float,
    waiting: Callable[[], str],
    every_s: float = _POLL_S,
    progress: Callable[[], int] = int,
) -> _Found:
    """Poll until `attempt` finds something.

    Raises WaitExpired with the text of `waiting` when `progress` has stayed the same for `deadline_s`.
    """
    seen = progress()
    until = time.monotonic() + deadline_s

    while (found := attempt()) is None:
        if (now_at := progress()) != seen:
            seen = now_at
            until = time.monotonic() + deadline_s
        if time.monotonic() > until:
            raise WaitExpired(f"{waiting()} ({deadline_s:g} s)")
        time.sleep(every_s)

    return found


def slot_geometry(run: RunFile, manifest: Manifest) -> Geometry:
    """Sizes of the slot table, the same in every process of the run."""
    # A rank writes one segment per tensor; the reserve is for writers that split large ones.
    config = run.config
    readers = max(256, config.generator.count * config.generator.tensor_parallel)
    return Geometry(config.weights.slots, config.learner.ranks, len(manifest.tensors) + 64, readers)


class Slots(Protocol):
    """Memory for several versions, and the table that says what is in it."""

    table: SlotTable
    """To be changed under `lock` only; what messages say about it may be read without."""

    def lock(self) -> AbstractContextManager[SlotTable]:
        """The table, to this process and thread alone."""
        ...

    def view(self, slot: int) -> memoryview:
        """The `Manifest.total_bytes` bytes of a slot."""
        ...

    def end_dead(self) -> None:
        """End the leases of readers that have ended without a word."""
        ...

    def close(self) -> None: ...


class WeightWriter(ABC):
    """One per learner rank; not thread-safe. Every rank calls `begin` and `commit` once per version, in order."""

    def __init__(self, run: RunFile, rank: int, manifest: Manifest) -> None:
        self._run = run
        self._rank = rank
        self._manifest = manifest
        self._slots: Slots | None = None  # once open
        self._writing: tuple[int, Version] | None = None  # the slot and its version, from `begin` to `commit`

    @abstractmethod
    def open(self) -> None:
        """Make (rank 0) or find (other ranks) the slots.

        Raises WaitExpired if rank 0 does not make them in time, WeightsError if it exports other tensors.
        """

    def begin(self, version: Version, deadline_s: float) -> memoryview:
        """Writable view of the whole slot that will hold `version`; this rank writes its own rows only.

        Waits for a free slot (never, with three slots); WaitExpired names who holds the slots.
        """
        slots = self._opened()
        if self._writing is not None:
            begun = label(self._writing[1])
            raise WeightsError(f"rank {self._rank} begins {label(version)} before it committed {begun}")

        def waiting() -> str:
            whom = f"that is for {slots.table.blockers()}" if self._rank == 0 else "chosen by rank 0"
            return f"learner rank {self._rank} waits for a weight slot for version {label(version)}, {whom}"

        slot = wait_for(lambda: self._find_slot(version), deadline_s, waiting)
        self._writing = slot, version
        return slots.view(slot)

    def commit(self, segments: Iterable[Segment]) -> None:
        """Publish the byte ranges that this rank wrote. The version is ready when every rank has committed.

        Raises WeightsError if ranges overlap, or if all ranks are done and a tensor is not wholly covered.
        """
        slots = self._opened()
        if self._writing is None:
            raise WeightsError(f"rank {self._rank} commits a version that it has not begun")

        slot, _ = self._writing
        view = slots.view(slot)
        complete: list[tuple[int, int, int]] = []
        for offset, length, *known in segments:
            complete.append((offset, length, known[0] if known else digest(view[offset : offset + length])))

        self._publish(slot, complete)
        self._writing = None

    def checksum(self, version: Version, deadline_s: float) -> int:
        """`combined_checksum` of `version`, once all ranks have committed it. For rank 0, before the next `begin`.

        Raises WaitExpired naming the ranks that have not.
        """
        slots = self._opened()

        def ready() -> Segments | None:
            with slots.lock() as table:
                return table.segments_of(version)

        def waiting() -> str:
            return f"learner rank {self._rank} waits for {slots.table.blockers()}, wants version {label(version)}"

        return combined_checksum(wait_for(ready, deadline_s, waiting))

    def name(self, draft: Version, version: Version) -> None:
        """Let readers have `draft`, which is ready, as `version`. For rank 0."""
        with self._opened().lock() as table:
            table.name(draft, version)

    def end_leases(self, reader: str, incarnation: int) -> None:
        """The reader `reader` (or every reader named `reader-...`) of this or an earlier incarnation is dead."""
        with self._opened().lock() as table:
            table.end_leases(reader, incarnation)

    def close(self) -> None:
        """Free what `open` made; nothing if it is not open."""
        if self._slots is not None:
            self._slots.close()
        self._slots = None

    def _find_slot(self, version: Version) -> int | None:
        """The slot to write `version` into, if there is one now: rank 0 chooses."""
        slots = self._opened()
        with slots.lock() as table:
            found = table.claim(version) if self._rank == 0 else table.writing(version)
        if found is None:
            slots.end_dead()
        return found

    def _check_layout(self, theirs: Manifest) -> None:
        if theirs != self._manifest:
            raise WeightsError(
                f"the weight slots of run {self._run.run_id} have another layout ({theirs.total_bytes} bytes a "
                f"version) than this process ({self._manifest.total_bytes}): all ranks must export the same tensors"
            )

    def _publish(self, slot: int, segments: list[tuple[int, int, int]]) -> None:
        with self._opened().lock() as table:
            table.commit(slot, self._rank, segments)

    def _opened(self) -> Slots:
        if self._slots is None:
            raise WeightsError(f"the weight writer of rank {self._rank} is not open")
        return self._slots


class WeightReader(ABC):
    """One per tensor-parallel rank of a generator. Its methods may be called from different threads, one at a time."""

    def __init__(self, run: RunFile, name: str, incarnation: int) -> None:
        self._run = run
        self._name = name
        self._incarnation = incarnation
        self._manifest: Manifest | None = None
        self._leased: Version | None = None
        self.progress = 0
        """Grows while `lease` and `checksum` advance, by the bytes received or verified. Any thread may read it."""

    @property
    def manifest(self) -> Manifest:
        """Known once opened."""
        if self._manifest is None:
            raise WeightsError(f"the weight reader {self._name} is not open")
        return self._manifest

    @abstractmethod
    def open(self, deadline_s: float) -> None:
        """Find the writer. Raises WaitExpired naming what is missing."""

    def lease(self, at_least: Version, deadline_s: float) -> tuple[Version, memoryview]:
        """The newest complete version, not older than `at_least`, and a read-only view of its bytes.

        The bytes stay as they are until `release()`, unless the writer was told that this reader is dead.
        Raises WaitExpired, naming who has not committed or does not send, after `deadline_s` without progress. To wait
        for another reader's lease is progress: that reader's load advances, or it ends.
        """
        if self._leased is not None:
            raise WeightsError(f"{self._name} already holds a lease")
        self._leased, view = self._acquire(at_least, deadline_s)
        return self._leased, view.toreadonly()

    def checksum(self) -> int:
        """Verify every byte range against its writer's digest; the `combined_checksum` of what was received.

        0 if the slot was overwritten meanwhile, which `release` then tells. Raises WeightsCorrupt naming the tensor.
        """
        leased = self._held()
        try:
            return self._verify()
        except WeightsCorrupt as error:
            raise WeightsCorrupt(f"{self._name}, version {label(leased)}: {error}") from None

    def release(self) -> bool:
        """End the lease. False: the bytes changed while it was held; lease again and read again."""
        self._held()
        self._leased = None
        return self._end()

    @abstractmethod
    def close(self) -> None:
        """End the lease, if there is one; nothing if it is not open."""

    @abstractmethod
    def _acquire(self, at_least: Version, deadline_s: float) -> tuple[Version, memoryview]:
        """See `lease`."""

    @abstractmethod
    def _verify(self) -> int:
        """See `checksum`."""

    @abstractmethod
    def _end(self) -> bool:
        """See `release`."""

    def _waiting(self, at_least: Version, progress: str) -> str:
        return f"{self._name} waits for weights {label(at_least)} or newer; {progress}"

    def _held(self) -> Version:
        if self._leased is None:
            raise WeightsError(f"{self._name} holds no lease")
        return self._leased
