"""Transport `zmq`: each rank serves its shard from private memory over `blobs.<rank>`; readers pull.

    reader                                rank r (a thread)
    Hello(name, incarnation)       ──▶
                                   ◀──    Welcome(manifest)
    Lease(ask, at_least)           ──▶                               answered when such a version is ready
                                   ◀──    Granted(ask, version, segments)
    Fetch(ask, offset, length) * n ──▶                               a few at a time: the reader's credit
                                   ◀──    Chunk(ask, offset) + one frame of bytes, sent without a copy
    Release(ask)                   ──▶
                                   ◀──    Released(ask, intact)

    rank 0: Describe(ask, version) ──▶                               for the checksum of the whole version
                                   ◀──    Granted(ask, version, segments)    (nothing is leased)

The slot protocol is that of shared memory (`rl.weights.slots`), one table per rank: a leased slot is not
overwritten, so frames still in flight stay valid. A lease ends by Release, by the reader's next incarnation, by
`end_leases`, or when its reader has been silent for `weights.deadline_s`. Works over ipc and tcp (with CURVE).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
import zmq
from msgspec import Struct

from rl.core.codec import PROTOCOL, ProtocolError
from rl.core.messages import Version
from rl.core.process import WaitExpired
from rl.core.run import RunFile
from rl.core.sockets import open_socket
from rl.weights.base import (
    Manifest,
    Segment,
    WeightsError,
    combined_checksum,
    label,
    save_manifest,
    wait_for,
)
from rl.weights.slots import Geometry, Lease, SlotTable, check_coverage
from rl.weights.verify import with_digests

_TICK_MS = 200
_NO_SPANS = np.empty((0, 2), np.int64)  # one rank alone covers no tensor; all together are checked


class Hello(Struct, frozen=True, tag="hello"):
    reader: str
    incarnation: int


class Welcome(Struct, frozen=True, tag="welcome"):
    manifest: Manifest


class AskLease(Struct, frozen=True, tag="lease"):
    ask: int  # number of this attempt, unique within the reader; answers to older ones are ignored
    at_least: Version


class Describe(Struct, frozen=True, tag="describe"):
    ask: int
    version: Version


class Granted(Struct, frozen=True, tag="granted"):
    ask: int
    version: Version
    segments: bytes  # (ranges, 3) uint64: offset, length, digest


class Fetch(Struct, frozen=True, tag="fetch"):
    ask: int
    offset: int
    length: int


class Chunk(Struct, frozen=True, tag="chunk"):
    """Followed by a frame with the bytes; without bytes if the lease has ended."""

    ask: int
    offset: int


class Release(Struct, frozen=True, tag="release"):
    """Also withdraws an AskLease that was not granted yet."""

    ask: int


class Released(Struct, frozen=True, tag="released"):
    ask: int
    intact: bool


WireMessage = Hello | Welcome | AskLease | Describe | Granted | Fetch | Chunk | Release | Released


class _Envelope(Struct, array_like=True):
    protocol: int
    body: WireMessage


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Envelope)


def encode_wire(message: WireMessage) -> bytes:
    return _encoder.encode(_Envelope(PROTOCOL, message))


def decode_wire(frame: bytes | memoryview) -> WireMessage:
    """Raises ProtocolError for anything but a message of this protocol."""
    try:
        envelope = _decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"not a weight message of protocol {PROTOCOL}: {error}") from None
    if envelope.protocol != PROTOCOL:
        raise ProtocolError(f"protocol {envelope.protocol}, this side speaks {PROTOCOL}")
    return envelope.body


def segments_of(granted: Granted) -> np.ndarray:
    return np.frombuffer(granted.segments, "<u8").reshape(-1, 3)


@dataclass
class _Peer:
    incarnation: int
    row: int
    seen: float
    asked: AskLease | Describe | None = None  # not answered yet
    lease: Lease | None = None
    ask: int = -1  # of the lease


class _Slots:
    """The private memory of one rank and the table over it, shared by the learner's thread and the server's."""

    def __init__(self, run: RunFile, manifest: Manifest) -> None:
        # As for shared memory: one range per tensor, and a reserve for writers that split large ones.
        geometry = Geometry(run.config.weights.slots, 1, len(manifest.tensors) + 64)
        self.manifest = manifest
        self.guard = threading.Lock()
        self.table = SlotTable(bytearray(geometry.nbytes), geometry, _NO_SPANS)
        self.table.clear()
        # Whole slots, but only pages that this rank writes are ever backed by memory.
        self._memory = [mmap.mmap(-1, max(1, manifest.total_bytes)) for _ in range(geometry.slots)]

    def view(self, slot: int) -> memoryview:
        return memoryview(self._memory[slot])[: self.manifest.total_bytes]


class _Server:
    """Answers the readers of one rank; `failed` holds what ended its thread."""

    def __init__(self, run: RunFile, rank: int, slots: _Slots) -> None:
        self._slots, self._silence_s = slots, run.config.weights.deadline_s
        self._socket = open_socket(zmq.ROUTER, run, "blobs", rank, bind=True)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._peers: dict[bytes, _Peer] = {}
        self._stopping = False
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._serve, name=f"weights.{rank}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A version has become ready."""
        os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        self._stopping = True
        self.wake()
        self._thread.join(5)
        os.close(self._wake_fd)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        try:
            while not self._stopping:
                poller.poll(_TICK_MS)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                while self._socket.poll(0):
                    self._receive(time.monotonic())
                self._answer(time.monotonic())
                self._end_silent(time.monotonic())
        except Exception as error:  # raised again in the learner by its next call
            traceback.print_exc()
            self.failed = f"the weight server ended: {type(error).__name__}: {error}"
        finally:
            self._socket.close(linger=0)

    def _receive(self, now: float) -> None:
        peer, *frames = self._socket.recv_multipart()
        try:
            message = decode_wire(frames[0])
            with self._slots.guard:
                self._handle(peer, message, now)
        except (ProtocolError, WeightsError) as error:  # one reader's fault, not the others'
            print(f"weights: ignored a message of {peer!r}: {error}", file=sys.stderr)

    def _handle(self, peer: bytes, message: WireMessage, now: float) -> None:
        if isinstance(message, Hello):
            row = self._slots.table.register(message.reader, message.incarnation, 0, 0)
            self._peers[peer] = _Peer(message.incarnation, row, now)
            self._send(peer, Welcome(self._slots.manifest))
            return
        state = self._peers.get(peer)
        if state is None:
            raise ProtocolError(f"{type(message).__name__} before hello")
        state.seen = now
        match message:
            case AskLease() | Describe():
                self._end(state)
                state.asked = message
            case Fetch(ask, offset, length):
                held = state.lease is not None and state.ask == ask and self._slots.table.intact(state.lease)
                if held and 0 <= offset <= offset + length <= self._slots.manifest.total_bytes:
                    assert state.lease is not None
                    data = self._slots.view(state.lease.slot)[offset : offset + length]
                    self._send(peer, Chunk(ask, offset), data)
                else:
                    self._send(peer, Chunk(ask, offset), b"")
            case Release(ask):
                self._send(peer, Released(ask, self._end(state)))
            case _:
                raise ProtocolError(f"unexpected {type(message).__name__}")

    def _answer(self, now: float) -> None:
        """Answer what became possible."""
        with self._slots.guard:
            for peer, state in list(self._peers.items()):
                match state.asked:
                    case AskLease(ask, at_least):
                        try:
                            lease = self._slots.table.lease(state.row, state.incarnation, at_least)
                        except WeightsError as error:  # replaced by a later incarnation
                            print(f"weights: dropped {peer!r}: {error}", file=sys.stderr)
                            del self._peers[peer]
                            continue
                        if lease is not None:
                            state.lease, state.ask, state.asked, state.seen = lease, ask, None, now
                            self._send(peer, self._granted(ask, lease.version))
                    case Describe(ask, version) if self._slots.table.segments_of(version) is not None:
                        state.asked = None
                        self._send(peer, self._granted(ask, version))

    def _granted(self, ask: int, version: Version) -> Granted:
        segments = self._slots.table.segments_of(version)
        assert segments is not None
        return Granted(ask, version, segments.tobytes())

    def _end(self, state: _Peer) -> bool:
        lease, state.lease, state.asked = state.lease, None, None
        return lease is not None and self._slots.table.release(lease)

    def _end_silent(self, now: float) -> None:
        with self._slots.guard:
            for state in self._peers.values():
                if state.lease is not None and now - state.seen > self._silence_s:
                    self._end(state)

    def _send(self, peer: bytes, message: WireMessage, data: memoryview | bytes | None = None) -> None:
        frames = [peer, encode_wire(message)] + ([] if data is None else [data])
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            state = self._peers.pop(peer, None)  # it has gone; its lease ends with it
            if state is not None:
                self._end(state)


class FramesWriter:
    """See `WeightWriter`."""

    def __init__(self, run: RunFile, rank: int, manifest: Manifest) -> None:
        self._run, self._rank, self._manifest = run, rank, manifest
        self._slots: _Slots | None = None
        self._server: _Server | None = None
        self._others: list[Catalogue] = []
        self._slot = -1
        self._version = Version(-1, -1)

    def open(self) -> None:
        self._slots = _Slots(self._run, self._manifest)
        self._server = _Server(self._run, self._rank, self._slots)
        if self._rank == 0:
            save_manifest(self._run.folder, self._run.run_id, self._manifest)
            self._others = [Catalogue(self._run, rank) for rank in range(1, self._run.config.learner.ranks)]

    def begin(self, version: Version, deadline_s: float) -> memoryview:
        slots, _ = self._opened()
        if self._slot >= 0:
            raise WeightsError(f"rank {self._rank} begins {label(version)} before it committed {label(self._version)}")

        def claim() -> int | None:
            with slots.guard:
                return slots.table.claim(version)

        self._slot = wait_for(
            claim,
            deadline_s,
            lambda: (
                f"learner rank {self._rank} waits for a weight slot for version {label(version)}, "
                f"that is for {slots.table.blockers()}"
            ),
        )
        self._version = version
        return slots.view(self._slot)

    def commit(self, segments: Iterable[Segment]) -> None:
        slots, server = self._opened()
        complete = with_digests(slots.view(self._slot), segments)
        with slots.guard:
            slots.table.commit(self._slot, 0, complete)
        self._slot = -1
        server.wake()

    def checksum(self, version: Version, deadline_s: float) -> int:
        """As in `WeightWriter`; the other ranks' digests are asked for over their sockets."""
        slots, _ = self._opened()
        until = time.monotonic() + deadline_s
        with slots.guard:
            own = slots.table.segments_of(version)
        if own is None:
            raise WeightsError(f"rank {self._rank} has not committed {label(version)}")
        tables = [own]
        tables += [other.segments(version, until - time.monotonic()) for other in self._others]
        complete = np.concatenate(tables)
        complete = complete[np.argsort(complete[:, 0])]
        check_coverage(complete, self._manifest.spans(), f"version {label(version)}")
        return combined_checksum(complete)

    def end_leases(self, reader: str, incarnation: int) -> None:
        slots, _ = self._opened()
        with slots.guard:
            slots.table.end_leases(reader, incarnation)

    def close(self) -> None:
        for other in self._others:
            other.close()
        if self._server is not None:
            self._server.stop()
        self._server = self._slots = None

    def _opened(self) -> tuple[_Slots, _Server]:
        if self._slots is None or self._server is None:
            raise WeightsError(f"the weight writer of rank {self._rank} is not open")
        if self._server.failed is not None:
            raise WeightsError(self._server.failed)
        return self._slots, self._server


class Catalogue:
    """Rank 0's questions to another rank: which ranges has it written? Leases and fetches nothing."""

    def __init__(self, run: RunFile, rank: int) -> None:
        self._rank, self._ask = rank, 0
        self._socket = open_socket(zmq.DEALER, run, "blobs", rank, identity=b"learner.0")
        self._socket.send(encode_wire(Hello("learner-0", 0)))

    def segments(self, version: Version, deadline_s: float) -> np.ndarray:
        """Raises WaitExpired unless the rank commits `version` in time."""
        until = time.monotonic() + deadline_s
        self._ask += 1
        self._socket.send(encode_wire(Describe(self._ask, version)))
        while self._socket.poll(max(0, int((until - time.monotonic()) * 1000))):
            message = decode_wire(self._socket.recv())
            if isinstance(message, Granted) and message.ask == self._ask:
                return segments_of(message)
        raise WaitExpired(f"learner rank 0 waits for rank {self._rank} to commit version {label(version)}")

    def close(self) -> None:
        self._socket.close(linger=0)
