"""The trace of a run: one append-only file for each process, merged when somebody reads it.

    trace = Trace(run.folder, "generator", 0, 0, level="full")
    trace.add(FirstToken(ticket, request, version))

    for record in read_trace(run.folder):  # of all processes, by time; also while the run goes on, or after a kill
        print(record.time, record.source, record.event)

A file is a sequence of records: a head (time, length of the content) and its content, an event in MessagePack. Each is
appended by one `write` (those of one instant together): what was told is in the kernel's hands, and a killed process
loses what it was writing, no more. Whatever ends a file in the midst of a record (a kill, a full disk) is skipped.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Union

import msgspec

from rl.observe.trace_events import OfTicket, SpanBegan, SpanEnded, StepEvent, TicketEvent, TraceEvent, TraceHeader

FOLDER = "trace"
SUFFIX = ".trace"
FORMAT = 1
MEASURED_EVERY = 16  # calls: reading the clock of a thread costs as much as a call
_HEAD = struct.Struct("<dI")
_ENCODER = msgspec.msgpack.Encoder()
_CHUNK = 1 << 20
_EVENTS = [
    each for kind in (StepEvent, TicketEvent, OfTicket) for each in kind.__subclasses__() if each is not OfTicket
]
_RECORD: Any = Union[tuple([TraceHeader, *_EVENTS])]  # noqa: UP007


class Source(msgspec.Struct, frozen=True):
    """Whose event it is."""

    role: str
    index: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.role}.{self.index}.{self.incarnation}"


class TraceRecord(NamedTuple):
    time: float
    """Seconds of Unix time, never going backwards within a process. Processes of one machine share one clock."""
    source: Source
    event: TraceEvent


def encode_record(at: float, event: TraceEvent | TraceHeader) -> bytes:
    """The record as it stands in a file, with its time on the file's clock."""
    content = _ENCODER.encode(event)
    return _HEAD.pack(at, len(content)) + content


class Trace:
    """Writes what one process tells, from any of its threads. A full disk ends the writing, never the run."""

    def __init__(self, run: Path, role: str, index: int, incarnation: int, level: str) -> None:
        """level: `off`, `steps` (nothing of single tickets) or `full`."""
        self._kept: type[TraceEvent] = TraceEvent if level == "full" else StepEvent
        self._lock = threading.Lock()  # so that times never go backwards in the file
        self._file = -1
        self._calls = 0
        self.cpu_s = 0.0
        """Spent on writing, from every MEASURED_EVERY-th call."""
        if level == "off":
            return

        path = run / FOLDER / f"{Source(role, index, incarnation)}{SUFFIX}"
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._give_up(error)
        clocks = (time.time(), time.monotonic())
        self._write([TraceHeader(FORMAT, role, index, incarnation, os.getpid(), *clocks, boot_id())])

    def add(self, *events: TraceEvent) -> None:
        """Write events that happen now, together: one `write` for all of them."""
        if self._file < 0:
            return
        self._calls += 1
        is_measured = self._calls % MEASURED_EVERY == 0
        begin = time.thread_time() if is_measured else 0.0
        if kept := [event for event in events if isinstance(event, self._kept)]:
            self._write(kept)

        if is_measured:
            end = time.thread_time()
            clock_s = time.thread_time() - end  # reading it takes as long as one event
            self.cpu_s += MEASURED_EVERY * max(0.0, end - begin - clock_s)

    @contextlib.contextmanager
    def span(self, name: str, step: int) -> Iterator[None]:
        """What is done within the block."""
        self.add(SpanBegan(name, step))
        try:
            yield
        finally:
            self.add(SpanEnded(name, step))

    def _write(self, events: Sequence[TraceEvent | TraceHeader]) -> None:
        with self._lock:
            if self._file < 0:
                return
            now = time.monotonic()
            content = b"".join([encode_record(now, event) for event in events])
            try:
                written = os.write(self._file, content)
                if written < len(content):
                    raise OSError(f"{written} of {len(content)} bytes were written")
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        with contextlib.suppress(OSError):  # the log may be on the same disk
            print(f"the trace is no longer kept: {error}", file=sys.stderr, flush=True)
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


NO_TRACE = Trace(Path(), "none", 0, 0, level="off")
"""The trace of whoever has none to write to."""


class TraceFile:
    """One process's file, as far as it has been written; `read` goes on where it ended the last time.

    Raises EOFError if the process was killed before it had written who it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next = 0
        self._decoder = msgspec.msgpack.Decoder(_RECORD)

        first = next(self._records(), None)
        if first is None or not isinstance(first[1], TraceHeader):
            raise EOFError(f"{path} does not say whose it is")
        self.header = first[1]
        self.source = Source(self.header.role, self.header.index, self.header.incarnation)

    def read(self) -> Iterator[tuple[float, TraceEvent]]:
        """Times are of the file's own clock."""
        for at, event in self._records():
            if not isinstance(event, TraceHeader):
                yield at, event

    def _records(self) -> Iterator[tuple[float, TraceEvent | TraceHeader]]:
        """What cannot be decoded ends the file: it was torn."""
        with self._path.open("rb", buffering=_CHUNK) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(self._next)
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                at, size = _HEAD.unpack(head)
                if self._next + len(head) + size > end:
                    return

                try:
                    event = self._decoder.decode(file.read(size))
                except (msgspec.DecodeError, UnicodeDecodeError):
                    return
                self._next += _HEAD.size + size
                yield at, event


def trace_files(run: Path) -> list[TraceFile]:
    """The files of every process that has begun so far."""
    found: list[TraceFile] = []
    for path in sorted((run / FOLDER).glob(f"*{SUFFIX}")):
        with contextlib.suppress(EOFError):
            found.append(TraceFile(path))
    return found


def read_trace(run: Path) -> Iterator[TraceRecord]:
    """Every process's events, merged by time; nothing where no trace was kept. Memory does not grow with the run."""
    files = trace_files(run)
    offsets = clock_offsets([file.header for file in files])
    yield from heapq.merge(*(_events(file, offsets[file.header]) for file in files), key=attrgetter("time"))


def told_since(run: Path, role: str, at: float) -> set[TraceEvent]:
    """What this role has told of tickets since `at` on CLOCK_MONOTONIC, in all incarnations on this machine."""
    files = [file for file in trace_files(run) if file.source.role == role]
    return {event for file in files for told, event in file.read() if told >= at and isinstance(event, TicketEvent)}


def clock_offsets(headers: list[TraceHeader]) -> dict[TraceHeader, float]:
    """What to add to each file's clock. On one machine it is the same for all, whoever set the wall clock meanwhile."""
    first: dict[str, TraceHeader] = {}
    for header in sorted(headers, key=lambda header: header.monotonic):
        first.setdefault(header.boot, header)
    return {header: first[header.boot].wall - first[header.boot].monotonic for header in headers}


def _events(file: TraceFile, offset: float) -> Iterator[TraceRecord]:
    for at, event in file.read():
        yield TraceRecord(at + offset, file.source, event)


def boot_id() -> str:
    """The id that this machine has had since it was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a container may hide it
        return socket.gethostname()
