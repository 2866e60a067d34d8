"""The two ends of a channel through hosts' memory: what `shm` and `zmq` have in common.

Who claims which slot, who waits for whom, what is published, verified and refused. A subclass adds where the slots are
(`Slots`) and how a receiver comes to the bytes. Invariants:

* a receiver is handed only versions that all ranks have committed and rank 0 has named, the newest at that moment;
* bytes that changed while they were read are never accepted (`release()` is False, or WeightsCorrupt);
* the sender never waits for a slow receiver when there are three slots (`weights.slots`).
"""

from __future__ import annotations

import math
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from rl.weights.channel import ITEM_BYTES, Entry, Piece, Receiver, Sender, Wait, WeightsCorrupt, WeightsError, label
from rl.weights.host.layout import PART_BYTES, Manifest, Segment, Segments, combined_checksum, digests
from rl.weights.host.slots import Geometry, SlotTable, draft_of
from rl.wire.awake import Awake
from rl.wire.messages import Version
from rl.wire.page_lock import PageLock
from rl.wire.process import WaitExpired
from rl.wire.run import RunFile

if TYPE_CHECKING:
    from torch import Tensor

# The engine only reads; a slot is mapped read-only on purpose.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

_Found = TypeVar("_Found")
_POLL_S = 0.001
_TURN_S = 1.0  # an attempt may ask a peer, and await the answer


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
    awake = Awake(time.monotonic(), max(every_s, _TURN_S))
    until = awake.read(time.monotonic()) + deadline_s

    while (found := attempt()) is None:
        if (now_at := progress()) != seen:
            seen = now_at
            until = awake.read(time.monotonic()) + deadline_s
        if awake.read(time.monotonic()) > until:
            raise WaitExpired(f"{waiting()} ({deadline_s:g} s)")
        time.sleep(every_s)

    return found


def slot_geometry(run: RunFile, manifest: Manifest) -> Geometry:
    """Sizes of the slot table, the same in every process of the run."""
    # A rank writes one segment for each part of a tensor.
    config = run.config
    segments = len(manifest.tensors) + manifest.total_bytes // PART_BYTES + 64
    return Geometry(config.weights.slots, config.learner.ranks, segments, config.weight_readers)


class Slots(Protocol):
    """Memory for several versions, and the table that says what is in it."""

    table: SlotTable
    """The table of slots, to be changed under `lock` only; what messages say about it may be read without."""

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


class HostSender(Sender):
    """Every rank calls `begin` and `commit` once per version, in order; `offer` is both, with tensors between."""

    _slots: Slots | None = None  # once open
    _writing: tuple[int, Version] | None = None  # the slot and its version, from `begin` to `commit`

    def __init__(self, run: RunFile, rank: int, entries: Iterable[Entry], wait: Wait | None = None) -> None:
        super().__init__(run, rank, entries, wait)
        self._manifest = Manifest.layout(self.entries)

    @abstractmethod
    def open(self) -> None:
        """Make (rank 0) or find (other ranks) the slots.

        Raises WaitExpired if rank 0 does not make them in time, WeightsError if it exports other tensors.
        """

    def offer(self, n: int, pieces: Iterable[Piece]) -> None:
        draft = draft_of(n)
        view = self.wait("slot", lambda seconds: self.begin(draft, seconds))
        self.commit(write(view, self._manifest, pieces))

    def receipt(self, n: int) -> int:
        draft = draft_of(n)
        return self.wait("other ranks' part", lambda seconds: self.checksum(draft, seconds))

    def announce(self, version: Version) -> None:
        with self._opened().lock() as table:
            table.name(draft_of(version.n), version)

    def begin(self, version: Version, deadline_s: float) -> memoryview:
        """Writable view of the whole slot that will hold `version`; this rank writes its own rows only.

        Waits for a free slot (never, with three slots); WaitExpired names who holds the slots.
        """
        if self._writing is not None:
            begun = label(self._writing[1])
            raise WeightsError(f"rank {self.rank} begins {label(version)} before it committed {begun}")

        def waiting() -> str:
            whom = f"that is for {self._opened().table.blockers()}" if self.rank == 0 else "chosen by rank 0"
            return f"learner rank {self.rank} waits for a weight slot for version {label(version)}, {whom}"

        slot = wait_for(lambda: self._find_slot(version), deadline_s, waiting)
        self._writing = slot, version
        return self._opened().view(slot)

    def commit(self, segments: list[Segment]) -> None:
        """Publish the byte ranges that this rank wrote. The version is ready when every rank has committed.

        Raises WeightsError if ranges overlap, or if all ranks are done and a tensor is not wholly covered.
        """
        if self._writing is None:
            raise WeightsError(f"rank {self.rank} commits a version that it has not begun")

        self._publish(self._writing[0], segments)
        self._writing = None

    def checksum(self, version: Version, deadline_s: float) -> int:
        """`combined_checksum` of `version`, once all ranks have committed it. Rank 0 calls it before the next `begin`.

        Raises WaitExpired naming the ranks that have not.
        """
        slots = self._opened()

        def ready() -> Segments | None:
            with slots.lock() as table:
                return table.segments_of(version)

        def waiting() -> str:
            return f"learner rank {self.rank} waits for {slots.table.blockers()}, wants version {label(version)}"

        return combined_checksum(wait_for(ready, deadline_s, waiting))

    def receiver_died(self, name: str, incarnation: int) -> None:
        with self._opened().lock() as table:
            table.end_leases(name, incarnation)

    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()
        self._slots = None

    def _find_slot(self, version: Version) -> int | None:
        """The slot to write `version` into, if there is one now: rank 0 chooses."""
        slots = self._opened()
        with slots.lock() as table:
            found = table.claim(version) if self.rank == 0 else table.writing(version)
        if found is None:
            slots.end_dead()
        return found

    def _check_layout(self, theirs: Manifest) -> None:
        if theirs != self._manifest:
            raise WeightsError(
                f"the weight slots of run {self.run.run_id} have another layout ({theirs.total_bytes} bytes a "
                f"version) than this process ({self._manifest.total_bytes}): all ranks must export the same tensors"
            )

    def _publish(self, slot: int, segments: list[Segment]) -> None:
        with self._opened().lock() as table:
            table.commit(slot, self.rank, segments)

    def _opened(self) -> Slots:
        if self._slots is None:
            raise WeightsError(f"the weight sender of rank {self.rank} is not open")
        return self._slots


class HostReceiver(Receiver):
    """`take` is a lease of a slot, with tensors on its bytes."""

    _manifest: Manifest | None = None
    _leased: Version | None = None

    def __init__(self, run: RunFile, name: str, incarnation: int, device: str = "cpu") -> None:
        super().__init__(run, name, incarnation, device)
        self._page_lock = PageLock(device)

    @property
    def manifest(self) -> Manifest:
        """The manifest, which is known once opened."""
        if self._manifest is None:
            raise WeightsError(f"the weight receiver {self.name} is not open")
        return self._manifest

    @abstractmethod
    def open(self, deadline_s: float) -> None:
        """Find the sender. Raises WaitExpired naming what is missing."""

    def take(self, at_least: Version, deadline_s: float) -> tuple[Version, Iterator[tuple[str, Tensor]]]:
        if self._manifest is None:
            self.open(deadline_s)
        version, view = self.lease(at_least, deadline_s)
        self._page_lock.add(view)
        return version, tensors(self.manifest, view)

    def lease(self, at_least: Version, deadline_s: float) -> tuple[Version, memoryview]:
        """The newest complete version, not older than `at_least`, and a read-only view of its bytes.

        The bytes stay as they are until `release()`, unless the sender was told that this receiver is dead.
        Raises WaitExpired, naming who has not committed or does not send, after `deadline_s` without progress. To wait
        for another receiver's lease is progress: its load advances, or it ends.
        """
        if self._leased is not None:
            raise WeightsError(f"{self.name} already holds a lease")
        self._leased, view = self._acquire(at_least, deadline_s)
        return self._leased, view.toreadonly()

    def receipt(self) -> int:
        """Verify every byte range against its sender's digest; the `combined_checksum` of what was received.

        0 if the slot was overwritten meanwhile, which `release` then tells. Raises WeightsCorrupt naming the tensor.
        """
        leased = self._held()
        try:
            return self._verify()
        except WeightsCorrupt as error:
            raise WeightsCorrupt(f"{self.name}, version {label(leased)}: {error}") from None

    def release(self) -> bool:
        self._held()
        self._leased = None
        return self._end()

    def close(self) -> None:
        """End the lease, if there is one; nothing if it is not open."""
        self._page_lock.close()
        self._close()
        self._manifest = self._leased = None

    @abstractmethod
    def _acquire(self, at_least: Version, deadline_s: float) -> tuple[Version, memoryview]:
        """See `lease`."""

    @abstractmethod
    def _verify(self) -> int:
        """See `receipt`."""

    @abstractmethod
    def _end(self) -> bool:
        """See `release`."""

    @abstractmethod
    def _close(self) -> None:
        """See `close`."""

    def _waiting(self, at_least: Version, progress: str) -> str:
        return f"{self.name} waits for weights {label(at_least)} or newer; {progress}"

    def _held(self) -> Version:
        if self._leased is None:
            raise WeightsError(f"{self.name} holds no lease")
        return self._leased


def write(view: memoryview, manifest: Manifest, pieces: Iterable[Piece]) -> list[Segment]:
    """Copy this rank's pieces into the slot and return the segments to commit.

    The cast to the engine's dtype happens in the copy, and threads hash what is written. Raises WeightsError for an
    unknown name or rows that do not fit.
    """
    return list(digests(view, _write_all(view, manifest, pieces)))


def tensors(manifest: Manifest, view: memoryview) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a leased slot as (name, tensor on the view's own bytes). Read only; valid until `release()`."""
    import torch

    for spec in manifest.tensors:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if not spec.nbytes:
            yield spec.name, torch.empty(spec.shape, dtype=dtype)
            continue
        count = spec.nbytes // ITEM_BYTES[spec.dtype]
        yield spec.name, torch.frombuffer(view, dtype=dtype, count=count, offset=spec.offset).view(spec.shape)


def _write_all(view: memoryview, manifest: Manifest, pieces: Iterable[Piece]) -> Iterator[tuple[int, int]]:
    """Offset and length of each range, as soon as it is written."""
    specs = {spec.name: spec for spec in manifest.tensors}
    for name, local, placement in pieces:
        if name not in specs:
            raise WeightsError(f"tensor {name!r} is not in the manifest of {len(specs)} tensors")
        if 0 in local.shape:
            continue

        spec = specs[name]
        begin = spec.offset + placement.row * spec.row_bytes
        length = math.prod(local.shape) * ITEM_BYTES[spec.dtype]
        if begin + length > spec.offset + spec.nbytes or tuple(local.shape[1:]) != spec.shape[1:]:
            rows = f"rows from {placement.row} on of shape {tuple(local.shape)}"
            raise WeightsError(f"tensor {name!r} of shape {spec.shape}: {rows} do not fit")

        flat = local.ravel() if isinstance(local, np.ndarray) else local.detach().reshape(-1)
        step = PART_BYTES // ITEM_BYTES[spec.dtype]
        for at in range(0, len(flat), step):
            part = flat[at : at + step]
            offset = begin + at * ITEM_BYTES[spec.dtype]
            _copy(view, offset, spec.dtype, part)
            yield offset, len(part) * ITEM_BYTES[spec.dtype]


def _copy(view: memoryview, offset: int, dtype: str, source: Tensor | np.ndarray) -> None:
    if isinstance(source, np.ndarray):
        np.frombuffer(view, dtype, len(source), offset)[:] = source
        return

    import torch

    target = torch.frombuffer(view, dtype=getattr(torch, dtype), count=len(source), offset=offset)
    # From a GPU the cast comes first: half the bytes cross the bus.
    target.copy_(source if source.device.type == "cpu" else source.to(target.dtype))
