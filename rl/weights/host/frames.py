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
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import zmq

from rl.weights.channel import Channel, WeightsError
from rl.weights.host import wire
from rl.weights.host.ends import HostSender, Slots, slot_geometry
from rl.weights.host.frames_receiver import FramesReceiver
from rl.weights.host.layout import Manifest, Segment
from rl.weights.host.slots import Lease, SlotTable
from rl.wire.messages import Version
from rl.wire.receiving import Malformed, Receiver
from rl.wire.run import RunFile
from rl.wire.sockets import open_socket

_TICK_S = 0.05
_ANSWER_S = 1.0  # longest that rank 0's server needs for an answer which waits for nothing


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


class _Server:
    """Answers readers and other ranks in a thread; `failed` holds what ended it."""

    def __init__(self, run: RunFile, rank: int, slots: PrivateSlots) -> None:
        self.failed: str | None = None
        self._slots = slots
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
                if name != f"{reader}.{incarnation}".encode():
                    raise WeightsError(f"{name!r} asks in the name of reader {reader!r}")
                return slots.lease(peer, question)

            case wire.Fetch(slot, offset, length):
                inside = 0 <= offset <= offset + length <= slots.manifest.total_bytes
                if not inside or not 0 <= slot < geometry.slots:
                    raise WeightsError(f"there are no bytes {offset} to {offset + length} of slot {slot}")
                return wire.Chunk(offset, np.frombuffer(slots.view(slot), np.uint8, length, offset))

            case wire.Release():
                return wire.Released(slots.release(peer))
        raise WeightsError(f"a weight server does not answer {type(question).__name__}")


class FramesSender(HostSender):
    """Each rank serves what it writes; rank 0 decides for all."""

    _server: _Server | None = None
    _first: wire.Connection | None = None  # to rank 0, on the other ranks

    def open(self) -> None:
        slots = PrivateSlots(self.run, self._manifest)
        self._slots = slots
        self._server = _Server(self.run, self.rank, slots)
        if self.rank:
            self._first = wire.Connection(self.run, 0, f"learner-{self.rank}")
            layout = self._first.ask(wire.Describe(), wire.Layout, self.run.config.timeouts.start_s)
            assert layout is not None
            self._check_layout(layout.manifest)

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
