"""Channel `zmq`, the receiving end: pulls one version from all ranks into private memory (see `frames`)."""

from __future__ import annotations

import mmap
import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import zmq

from rl.weights.channel import label
from rl.weights.host import wire
from rl.weights.host.ends import HostReceiver, wait_for
from rl.weights.host.layout import ALIGNMENT, Manifest, Segments, Verifier, combined_checksum
from rl.wire.messages import Version
from rl.wire.process import WaitExpired

CHUNK_BYTES = 4 << 20
CREDIT = 4  # chunks asked for and not received, per rank
_ASK_AGAIN_S = 0.01
_SILENCE_S = 3.0  # after so long all is asked again: a learner that was replaced knows nothing of it


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
    padding = {spec.offset + spec.nbytes for spec in manifest.tensors}  # where the gap up to the next tensor starts
    runs: list[tuple[int, int]] = []  # first byte and one past the last byte
    for offset, length, _ in segments.tolist():
        end = runs[-1][1] if runs else -1
        follows = -(-end // ALIGNMENT) * ALIGNMENT if end in padding else end
        begin = runs.pop()[0] if offset == follows else offset
        runs.append((begin, offset + length))

    for begin, end in runs:
        for at in range(begin, end, CHUNK_BYTES):
            yield at, min(CHUNK_BYTES, end - at)


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
        question = wire.AskLease(self.name, self.incarnation, at_least)

        silence_s = min(_SILENCE_S, deadline_s)

        def attempt() -> wire.Granted | None:
            granted = first.ask(question, wire.Granted, silence_s)
            self.progress += 0 if granted else first.not_yet.leases
            return granted

        seen = self.progress
        until = time.monotonic() + deadline_s
        while True:
            try:
                granted = wait_for(
                    attempt,
                    deadline_s,
                    lambda: self._waiting(at_least, first.not_yet.waiting),
                    _ASK_AGAIN_S,
                    lambda: self.progress,
                )

                self._fetch(granted, view, silence_s)
                released = first.ask(wire.Release(), wire.Released, silence_s)
                if released is not None and released.intact:
                    return granted.version, view

            except WaitExpired:
                if self.progress != seen:
                    seen = self.progress
                    until = time.monotonic() + deadline_s
                if time.monotonic() >= until:
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
