"""Transport `zmq`, the reading end: pulls one version from all ranks into private memory (see `rl.weights.frames`)."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import zmq

from rl.core.messages import Version
from rl.core.process import WaitExpired
from rl.core.run import RunFile
from rl.core.sockets import open_socket
from rl.weights.base import ALIGNMENT, Manifest, WeightsCorrupt, WeightsError, combined_checksum, label
from rl.weights.frames import (
    AskLease,
    Chunk,
    Fetch,
    Granted,
    Hello,
    Release,
    Released,
    Welcome,
    WireMessage,
    decode_wire,
    encode_wire,
    segments_of,
)
from rl.weights.slots import check_coverage
from rl.weights.verify import Verifier

CHUNK_BYTES = 4 << 20
CREDIT = 4  # chunks asked for and not received, per rank


class _Stream:
    """What one rank is asked for and answers. `ask` numbers attempts; answers to older ones are dropped."""

    def __init__(self, run: RunFile, rank: int, name: str, incarnation: int) -> None:
        self.rank = rank
        self.socket = open_socket(zmq.DEALER, run, "blobs", rank, identity=f"{name}.{incarnation}".encode())
        self._send(Hello(name, incarnation))
        self.welcome: Welcome | None = None
        self.granted: Granted | None = None
        self.released: Released | None = None
        self.torn = False
        self._ask = 0
        self._wanted: deque[tuple[int, int]] = deque()
        self._coming: deque[tuple[int, int]] = deque()
        self._into: memoryview | None = None
        self._verifier: Verifier | None = None

    def ask(self, at_least: Version) -> None:
        self._ask += 1
        self.granted = self.released = None
        self.torn = False
        self._wanted.clear()
        self._coming.clear()
        self._send(AskLease(self._ask, at_least))

    def fetch(self, into: memoryview, manifest: Manifest) -> None:
        """Begin to receive the granted ranges."""
        assert self.granted is not None
        table = segments_of(self.granted)
        self._into, self._verifier = into, Verifier(into, table, manifest)
        self._wanted.extend(pieces(table, manifest))
        for _ in range(CREDIT):
            self._ask_next()

    def release(self) -> None:
        self._send(Release(self._ask))

    def fault(self) -> WeightsCorrupt | None:
        """Once fetched: whether what arrived is what the rank wrote."""
        assert self._verifier is not None
        try:
            self._verifier.finish()
        except WeightsCorrupt as error:
            return error
        return None

    @property
    def fetched(self) -> bool:
        return not self._wanted and not self._coming

    def receive(self) -> None:
        """One message, which is there."""
        message = decode_wire(self.socket.recv())
        if isinstance(message, Chunk):
            self._receive_chunk(message)
        elif isinstance(message, Welcome):
            self.welcome = message
        elif isinstance(message, Granted) and message.ask == self._ask:
            self.granted = message
        elif isinstance(message, Released) and message.ask == self._ask:
            self.released = message

    def close(self) -> None:
        self.socket.close(linger=200)

    def _receive_chunk(self, chunk: Chunk) -> None:
        if chunk.ask != self._ask or not self._coming or self._into is None or self._verifier is None:
            self.socket.recv()
            return
        offset, length = self._coming.popleft()
        received = self.socket.recv_into(self._into[offset : offset + length])
        if offset != chunk.offset or received != length:
            self.torn = True
        if self.torn:
            self._wanted.clear()
            return
        self._verifier.advance(offset + length)
        self._ask_next()

    def _ask_next(self) -> None:
        if self._wanted:
            offset, length = self._wanted.popleft()
            self._coming.append((offset, length))
            self._send(Fetch(self._ask, offset, length))

    def _send(self, message: WireMessage) -> None:
        self.socket.send(encode_wire(message), zmq.DONTWAIT)


def pieces(segments: np.ndarray, manifest: Manifest) -> Iterator[tuple[int, int]]:
    """(offset, length) of chunks, in order, that hold all segments and nothing that another rank wrote."""
    padding = {spec.offset + spec.nbytes for spec in manifest.tensors}  # where the gap up to the next tensor starts
    runs: list[list[int]] = []
    for offset, length, _ in segments.tolist():
        if runs:
            end = sum(runs[-1])
            if offset == (-(-end // ALIGNMENT) * ALIGNMENT if end in padding else end):
                runs[-1][1] = offset + length - runs[-1][0]
                continue
        runs.append([offset, length])
    for offset, length in runs:
        for begin in range(0, length, CHUNK_BYTES):
            yield offset + begin, min(CHUNK_BYTES, length - begin)


class FramesReader:
    """See `WeightReader`. A leased view is private memory: the ranks' slots are free as soon as all has arrived."""

    def __init__(self, run: RunFile, name: str, incarnation: int) -> None:
        self._run, self._name, self._incarnation = run, name, incarnation
        self._streams: list[_Stream] = []
        self._manifest: Manifest | None = None
        self._memory: mmap.mmap | None = None
        self._version: Version | None = None
        self._checksum = 0
        self._fault: WeightsCorrupt | None = None

    @property
    def manifest(self) -> Manifest:
        if self._manifest is None:
            raise WeightsError(f"the weight reader {self._name} is not open")
        return self._manifest

    def open(self, deadline_s: float) -> None:
        ranks = range(self._run.config.learner.ranks)
        self._streams = [_Stream(self._run, rank, self._name, self._incarnation) for rank in ranks]
        self._until(lambda s: s.welcome is not None, time.monotonic() + deadline_s, "to serve weights")
        manifests = [stream.welcome.manifest for stream in self._streams if stream.welcome is not None]
        if any(manifest != manifests[0] for manifest in manifests):
            raise WeightsError(f"{self._name}: the ranks export different tensors")
        self._manifest = manifests[0]
        # Mapped and touched once: receiving into fresh pages is ten times slower.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._memory = mmap.mmap(-1, max(1, self._manifest.total_bytes), flags=flags)

    def lease(self, at_least: Version, deadline_s: float) -> tuple[Version, memoryview]:
        if self._version is not None:
            raise WeightsError(f"{self._name} already holds a lease")
        manifest, until = self.manifest, time.monotonic() + deadline_s
        assert self._memory is not None
        view = memoryview(self._memory)[: manifest.total_bytes]
        try:
            while True:
                version = self._agree(at_least, until)
                for stream in self._streams:
                    stream.fetch(view, manifest)
                self._until(lambda s: s.fetched, until, f"to send weights {label(version)}")
                if self._end_leases(until):
                    break
        except WaitExpired:
            for stream in self._streams:  # else a rank would keep the slot until its own deadline
                stream.release()
            raise
        tables = [segments_of(stream.granted) for stream in self._streams if stream.granted is not None]
        table = np.concatenate(tables)
        table = table[np.argsort(table[:, 0])]
        check_coverage(table, manifest.spans(), f"version {label(version)}")
        self._version, self._checksum = version, combined_checksum(table)
        self._fault = next((fault for stream in self._streams if (fault := stream.fault()) is not None), None)
        return version, view.toreadonly()

    def checksum(self) -> int:
        """As in `WeightReader`; the bytes were verified as they arrived."""
        if self._version is None:
            raise WeightsError(f"{self._name} holds no lease")
        if self._fault is not None:
            raise WeightsCorrupt(f"{self._name}, version {label(self._version)}: {self._fault}")
        return self._checksum

    def release(self) -> bool:
        """True: nobody else writes into this memory."""
        if self._version is None:
            raise WeightsError(f"{self._name} holds no lease")
        self._version = None
        return True

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams = []
        self._memory = None

    def _agree(self, at_least: Version, until: float) -> Version:
        """Lease one and the same version at every rank. Ranks commit at different moments, so some may be ahead."""
        behind = self._streams
        while True:
            for stream in behind:
                stream.ask(at_least)
            self._until(lambda s: s.granted is not None, until, f"to commit weights {label(at_least)} or newer")
            versions = {s.rank: s.granted.version for s in self._streams if s.granted is not None}
            at_least = max(versions.values())
            behind = [stream for stream in self._streams if versions[stream.rank] != at_least]
            if not behind:
                return at_least

    def _end_leases(self, until: float) -> bool:
        """False if a rank's bytes changed while they were sent."""
        for stream in self._streams:
            stream.release()
        self._until(lambda s: s.released is not None, until, "to end a lease")
        return all(s.released is not None and s.released.intact and not s.torn for s in self._streams)

    def _until(self, done: Callable[[_Stream], bool], until: float, what: str) -> None:
        """Receive from all ranks until each is `done`; WaitExpired naming those that are not."""
        poller = zmq.Poller()
        for stream in self._streams:
            poller.register(stream.socket, zmq.POLLIN)
        while waiting := [stream for stream in self._streams if not done(stream)]:
            left_ms = max(0, int((until - time.monotonic()) * 1000))
            ready = dict(poller.poll(left_ms))
            if not ready:
                ranks = ", ".join(str(stream.rank) for stream in waiting)
                raise WaitExpired(f"{self._name} waits for learner rank {ranks} {what}")
            for stream in self._streams:
                if stream.socket in ready:
                    stream.receive()
