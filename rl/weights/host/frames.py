"""Channel `zmq`: each rank serves its shard from private memory over `blobs.<rank>`; readers pull.

    reader                                      rank 0 (a thread)
    AskLease(reader, incarnation, at_least) ──▶
                                            ◀── Granted(version, slot, segments), or NotYet(who is waited for)
                                                every rank r (a thread)
    Fetch(slot, offset, length) * n         ──▶                  a few at a time, as the reader asks
                                            ◀── Chunk(offset, data), sent without a copy
                                                rank 0
    Release                                 ──▶
                                            ◀── Released(intact)

Rank 0 has the slot table, that of shared memory (`rl.weights.host.slots`); the other ranks ask it where to write
(`FindSlot`) and tell it what they have written (`Commit`). A leased slot is not overwritten, so frames still in flight
stay valid. A lease ends by Release, by the reader's next attempt or incarnation, by `end_leases`, or when its reader
has been silent for `weights.deadline_s` and somebody waits for it. Works over ipc and tcp (with CURVE).
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import zmq

from rl.weights.channel import Channel, WeightsError, label
from rl.weights.host import wire
from rl.weights.host.bulk import CHUNK_BYTES, CREDIT
from rl.weights.host.ends import HostReceiver, HostSender, Slots, slot_geometry, wait_for
from rl.weights.host.layout import Manifest, Segment, Segments, Verifier, combined_checksum
from rl.weights.host.slots import Lease, SlotTable
from rl.wire.messages import Version
from rl.wire.process import WaitExpired
from rl.wire.receiving import Malformed, Receiver
from rl.wire.run import RunFile
from rl.wire.sockets import open_socket

_TICK_S = 0.05
_ANSWER_S = 1.0  # longest that rank 0's server needs for an answer which waits for nothing
ASK_AGAIN_S = 0.01
SILENCE_S = 3.0  # after so long all is asked again: a learner that was replaced knows nothing of it
_Found = TypeVar("_Found")


# ------------------------------------------------------------ the receiving end


class _Stream:
    """What one rank wrote into a slot, fetched in order and verified as it arrives."""

    def __init__(
        self, connection: wire.Connection, slot: int, segments: Segments, into: memoryview, manifest: Manifest
    ) -> None:
        self.connection = connection
        self.verifier = Verifier(into, segments, manifest)
        self._slot = slot
        self._into = np.frombuffer(into, np.uint8)
        self._wanted = pieces(segments, manifest)
        self._coming: deque[tuple[int, int]] = deque()
        connection.begin()
        for _ in range(CREDIT):
            self._ask_next()

    @property
    def fetched(self) -> bool:
        return not self._coming

    def receive(self) -> int:
        """Take one message, which is there; returns how many bytes it brought."""
        chunk = self.connection.receive()
        if not isinstance(chunk, wire.Chunk):
            return 0

        offset, length = self._coming.popleft()
        self._into[offset : offset + length] = chunk.data
        self.verifier.advance(offset + length)
        self._ask_next()
        return length

    def _ask_next(self) -> None:
        piece = next(self._wanted, None)
        if piece is not None:
            self._coming.append(piece)
            self.connection.post(wire.Fetch(self._slot, *piece))


def pieces(segments: Segments, manifest: Manifest) -> Iterator[tuple[int, int]]:
    """(offset, length) of chunks, in order, that hold all segments and nothing that another rank wrote."""
    for begin, end, _ in manifest.runs(segments):
        for at in range(begin, end, CHUNK_BYTES):
            yield at, min(CHUNK_BYTES, end - at)


def persist(receiver: HostReceiver, attempt: Callable[[], _Found | None], deadline_s: float) -> _Found:
    """What `attempt` finds. It is tried again when it expires, as long as `progress` has not stood still for the
    deadline: the other end may have been replaced."""
    seen = receiver.progress
    until = time.monotonic() + deadline_s
    while True:
        try:
            if (found := attempt()) is not None:
                return found
        except WaitExpired:
            if receiver.progress != seen:
                seen = receiver.progress
                until = time.monotonic() + deadline_s
            if time.monotonic() >= until:
                raise


def granted(
    first: wire.Connection, receiver: HostReceiver, at_least: Version, deadline_s: float, waiting: Callable[[], str]
) -> wire.Granted:
    """A lease of the newest version at rank 0."""
    question = wire.AskLease(receiver.name, receiver.incarnation, at_least)

    def attempt() -> wire.Granted | None:
        found = first.ask(question, wire.Granted, min(SILENCE_S, deadline_s))
        receiver.progress += 0 if found else first.not_yet.leases
        return found

    return wait_for(attempt, deadline_s, waiting, ASK_AGAIN_S, lambda: receiver.progress)


class FramesReceiver(HostReceiver):
    """A leased view is private memory: the ranks' slots are free as soon as all has arrived."""

    _ranks: Sequence[wire.Connection] = ()
    _streams: Sequence[_Stream] = ()  # of the leased version
    _segments: Segments
    _memory: mmap.mmap | None = None

    def open(self, deadline_s: float) -> None:
        ranks = range(self.run.config.learner.ranks)
        self._ranks = [wire.Connection(self.run, rank, self.name, self.incarnation) for rank in ranks]
        layout = self._ranks[0].ask(wire.Describe(), wire.Layout, deadline_s)
        assert layout is not None
        self._manifest = layout.manifest
        # Mapped and touched once: receiving into fresh pages is ten times slower.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._memory = mmap.mmap(-1, max(1, self._manifest.total_bytes), flags=flags)

    def _close(self) -> None:
        for connection in self._ranks:
            connection.close()
        self._ranks = self._streams = ()
        self._memory = None

    def _acquire(self, at_least: Version, deadline_s: float) -> tuple[Version, memoryview]:
        manifest = self.manifest
        assert self._memory is not None
        view = memoryview(self._memory)[: manifest.total_bytes]
        first = self._ranks[0]
        silence_s = min(SILENCE_S, deadline_s)

        def attempt() -> tuple[Version, memoryview] | None:
            lease = granted(first, self, at_least, deadline_s, lambda: self._waiting(at_least, first.not_yet.waiting))
            self._fetch(lease, view, silence_s)
            released = first.ask(wire.Release(), wire.Released, silence_s)
            return (lease.version, view) if released is not None and released.intact else None

        try:
            return persist(self, attempt, deadline_s)
        except WaitExpired:
            first.post(wire.Release())  # else rank 0 would keep the slot until its own deadline
            raise

    def _fetch(self, granted: wire.Granted, view: memoryview, deadline_s: float) -> None:
        """Receive what every rank wrote. Raises WaitExpired naming the ranks that send nothing for `deadline_s`."""
        tables = [np.array(rows, np.uint64).reshape(-1, 3) for rows in granted.segments]
        self._segments = np.concatenate(tables)
        self._streams = [
            _Stream(connection, granted.slot, table, view, self.manifest)
            for connection, table in zip(self._ranks, tables, strict=True)
        ]
        poller = zmq.Poller()
        for stream in self._streams:
            poller.register(stream.connection.socket, zmq.POLLIN)

        while waiting := [stream for stream in self._streams if not stream.fetched]:
            ready = dict(poller.poll(int(1000 * deadline_s)))
            if not ready:
                ranks = ", ".join(str(stream.connection.rank) for stream in waiting)
                raise WaitExpired(f"{self.name} waits for learner rank {ranks} to send {label(granted.version)}")
            for stream in self._streams:
                if stream.connection.socket in ready:
                    self.progress += stream.receive()

    def _verify(self) -> int:
        for stream in self._streams:
            stream.verifier.finish()
        return combined_checksum(self._segments)

    def _end(self) -> bool:
        return True  # nobody else writes into this memory


# ------------------------------------------------------------ the sending end


@dataclass
class _Held:
    lease: Lease
    seen: float  # when its reader last said something


class PrivateSlots:
    """Slots in the memory of one rank, for its main thread and its server: `rl.weights.host.ends.Slots`."""

    def __init__(self, run: RunFile, manifest: Manifest) -> None:
        geometry = slot_geometry(run, manifest)
        self.manifest = manifest
        self.table = SlotTable(bytearray(geometry.nbytes), geometry, manifest.spans())
        self.table.clear()
        self._thread = threading.Lock()
        self._held: dict[bytes, _Held] = {}  # by socket identity
        self.fetched: Counter[str] = Counter()  # as readers say
        self._silence_s = run.config.weights.deadline_s
        # Whole slots, but only pages that this rank writes are ever backed by memory.
        self._memory = [mmap.mmap(-1, max(1, manifest.total_bytes)) for _ in range(geometry.slots)]

    def view(self, slot: int) -> memoryview:
        return memoryview(self._memory[slot])[: self.manifest.total_bytes]

    @contextlib.contextmanager
    def lock(self) -> Iterator[SlotTable]:
        with self._thread:
            yield self.table

    def lease(self, peer: bytes, ask: wire.AskLease) -> wire.Granted | wire.NotYet:
        """Lease the newest version to a reader. Raises WeightsError for an incarnation that was replaced."""
        self.end_dead()
        with self.lock() as table:
            row = table.register(ask.reader, ask.incarnation)
            lease = table.lease(row, ask.incarnation, ask.at_least)
            if lease is None:
                return wire.NotYet(table.progress(), len(table.leased()))
            self._held[peer] = _Held(lease, time.monotonic())
            ranks = range(table.geometry.ranks)
            segments = [[tuple(row) for row in table.segments(lease.slot, rank).tolist()] for rank in ranks]
            return wire.Granted(lease.version, lease.slot, segments)

    def release(self, peer: bytes) -> bool:
        """Whether the bytes were intact to the end."""
        with self.lock() as table:
            held = self._held.pop(peer, None)
            return held is not None and table.release(held.lease)

    def saw(self, peer: bytes) -> None:
        """The reader behind `peer` has said something."""
        if held := self._held.get(peer):
            held.seen = time.monotonic()

    def end_dead(self) -> None:
        """End the leases of readers that have been silent for too long."""
        oldest = time.monotonic() - self._silence_s
        for peer in [peer for peer, held in list(self._held.items()) if held.seen < oldest]:
            self.release(peer)

    def close(self) -> None:
        """Does nothing: the memory goes with the last view of it."""


Parts = Callable[[str, wire.AskParts], wire.Answer]
"""How a reader, `name.incarnation`, fetches in bulk what a rank wrote into a leased slot.

Raises WeightsError for what cannot be."""


class _Server:
    """Answers readers and other ranks in a thread; `failed` holds what ended it."""

    def __init__(self, run: RunFile, rank: int, slots: PrivateSlots, parts: Parts) -> None:
        self.failed: str | None = None
        self._slots = slots
        self._parts = parts
        self._names = run.names
        self._stopping = False
        self._socket = open_socket(zmq.ROUTER, run, "blobs", rank, bind=True)
        self._thread = threading.Thread(target=self._serve, name=f"weights.{rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(5)

    def _serve(self) -> None:
        receiver = Receiver({self._socket: self._from_peer}, Malformed("weights"), codec=wire.codec)
        try:
            while not self._stopping:
                receiver.wait(_TICK_S)
                receiver.drain()
        except Exception as error:  # raised again in the learner by its next call
            traceback.print_exc()
            self.failed = f"the weight server ended: {type(error).__name__}: {error}"
        finally:
            self._socket.close(linger=0)

    def _from_peer(self, asked: wire.Numbered, peer: bytes) -> None:
        name = self._names.plain(peer)
        self._slots.saw(peer)
        try:
            answer = self._answer(peer, name, asked.message)
        except (WeightsError, IndexError, OverflowError) as error:  # the latter two: a number beyond the table
            answer = wire.Refused(str(error))

        answered = wire.codec.encode(wire.Numbered(asked.number, answer))
        try:
            self._socket.send_multipart([peer, *answered], zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._slots.release(peer)  # it has gone, or does not read; its lease ends with it

    def _answer(self, peer: bytes, name: bytes, question: wire.Question | wire.Answer) -> wire.Answer:
        """Raises WeightsError for what cannot be answered."""
        slots = self._slots
        geometry = slots.table.geometry
        match question:
            case wire.Describe():
                return wire.Layout(slots.manifest)

            case wire.FindSlot(version):
                with slots.lock() as table:
                    found = table.writing(version)
                return wire.NotYet("rank 0 to choose it") if found is None else wire.Slot(found)

            case wire.Commit(rank, slot, segments):
                if not name.startswith(b"learner-%d." % rank):
                    raise WeightsError(f"{name!r} commits in the name of rank {rank}")
                with slots.lock() as table:
                    table.commit(slot, rank, segments)
                return wire.Slot(slot)

            case wire.AskLease(reader, incarnation):
                if name != f"{reader}.{incarnation}".encode() or not reader.startswith("generator-"):
                    raise WeightsError(f"{name!r} asks in the name of reader {reader!r}")
                return slots.lease(peer, question)

            case wire.Fetch(slot, offset, length):
                inside = 0 <= offset <= offset + length <= slots.manifest.total_bytes
                if not inside or not 0 <= slot < geometry.slots:
                    raise WeightsError(f"there are no bytes {offset} to {offset + length} of slot {slot}")
                return wire.Chunk(offset, np.frombuffer(slots.view(slot), np.uint8, length, offset))

            case wire.AskParts():
                return self._parts(name.decode(), question)

            case wire.Release(fetched):
                slots.fetched.update(fetched)
                return wire.Released(slots.release(peer))
        raise WeightsError(f"a weight server does not answer {type(question).__name__}")


class FramesSender(HostSender):
    """Each rank serves what it writes; rank 0 decides for all."""

    _server: _Server | None = None
    _first: wire.Connection | None = None  # to rank 0, on the other ranks

    def open(self) -> None:
        slots = PrivateSlots(self.run, self._manifest)
        self._slots = slots
        self._server = _Server(self.run, self.rank, slots, self.parts)
        if self.rank:
            self._first = wire.Connection(self.run, 0, f"learner-{self.rank}")
            layout = self._first.ask(wire.Describe(), wire.Layout, self.run.config.timeouts.start_s)
            assert layout is not None
            self._check_layout(layout.manifest)

    def parts(self, reader: str, ask: wire.AskParts) -> wire.Answer:
        """The answer to a reader that fetches in bulk, in the server's thread."""
        raise WeightsError(f"{reader} asks channel zmq for bulk: all processes must have the same weights.transport")

    def close(self) -> None:
        if self._first is not None:
            self._first.close()
        if self._server is not None:
            self._server.stop()
        self._first = self._server = None
        super().close()

    def _find_slot(self, version: Version) -> int | None:
        if self._first is None:
            return super()._find_slot(version)
        self._opened()
        found = self._first.ask(wire.FindSlot(version), wire.Slot, _ANSWER_S)
        return None if found is None else found.slot

    def _publish(self, slot: int, segments: list[Segment]) -> None:
        if self._first is None:
            super()._publish(slot, segments)
        else:
            self._opened()
            deadline_s = self.run.config.weights.deadline_s
            self._first.ask(wire.Commit(self.rank, slot, segments), wire.Slot, deadline_s)

    def _opened(self) -> Slots:
        if self._server is not None and self._server.failed is not None:
            raise WeightsError(self._server.failed)
        return super()._opened()


FRAMES = Channel(FramesSender, FramesReceiver)
