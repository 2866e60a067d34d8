"""The broker's write-ahead log: its state at one moment, and every event since. After its death it goes on from there.

    log = WriteAheadLog(path)
    if log.exists():                 # of an earlier incarnation
        state, events = log.read()
    log.begin(state)                 # replaces what is there, at once
    log.append(now, message)         # every event, before it changes anything outside
    log.flush()                      # before anything leaves that follows from it; in every turn of the loop

A record is a head (length, xxh3 of the content, xxh3 of both) and its content. The first holds the state, pickled:
plug-ins keep what they like, and nobody but this process's successor reads it. The others hold a time and the frames of
a message. What is written survives the process at once. It is synced to the disk in groups, a second's records each, by
a thread beside the loop. Nobody waits for the disk: after a machine's death the run recovers from a checkpoint.

Large arrays, such as columns with hundreds of bytes a token, stay out of the log. They stand in a file beside it, which
only grows: the record says where, and what they hash to. They are written before their record, so that a record that
is whole has all of them. A log that begins anew begins a new file, and the old one goes with the old log.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh3_64
from xxhash import xxh3_64_intdigest as digest

from rl.config.failures import EndsRun
from rl.wire.codec import SHARED_FRAMES, is_large
from rl.wire.messages import Message, decode, encode

_HEAD = struct.Struct("<QQ")
_CHECK = struct.Struct("<Q")
_LONG_BYTES = 64 << 20
_LONG_BYTES_BESIDE = 1 << 30
_LONG_EVENTS = 50_000  # a second or two to read again
_ALIGNMENT = 8  # of arrays beside the log
SYNC_S = 1.0


class LogDamaged(EndsRun, RuntimeError):
    """One line with the path and what to do."""

    one_line = True


class _Beside(msgspec.Struct, array_like=True):
    """Where a record's large arrays stand, one behind the other."""

    offset: int
    sizes: list[int]
    digest: int

    def places(self) -> list[slice]:
        places = []
        start = self.offset
        for size in self.sizes:
            places.append(slice(start, start + size))
            start += size + -size % _ALIGNMENT
        return places


class WriteAheadLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[bytes] = []
        self._waiting_beside: list[bytes | memoryview] = []
        self._events = 0
        self._bytes = 0
        self._bytes_beside = 0

        self._disk = ThreadPoolExecutor(1, "sync of the log")
        self._syncing: Future[None] | None = None
        self._synced_at = 0.0
        self._is_synced = True

    def exists(self) -> bool:
        return self._path.exists()

    def begin(self, state: Any) -> None:
        """From now on the log is this state and what follows."""
        earlier = self._files_beside()
        beside = 1 + max(earlier, default=0)
        self._beside = self._file_beside(beside).open("wb")
        self._bytes_beside = 0
        partial = self._path.with_suffix(".tmp")
        self._file = partial.open("wb")

        large: list[memoryview] = []
        pickled = pickle.dumps(state, pickle.HIGHEST_PROTOCOL, buffer_callback=lambda each: not _take(each, large))
        self._waiting = [*_record(msgspec.msgpack.encode((beside, pickled, self._put_beside(large))))]
        self.flush()
        partial.replace(self._path)
        for number in earlier:
            self._file_beside(number).unlink()

        self._events = 0
        self._limit = _LONG_BYTES + 2 * self._bytes
        self._limit_beside = _LONG_BYTES_BESIDE + 2 * self._bytes_beside
        self._bytes = 0

    @property
    def is_long(self) -> bool:
        """Beginning anew costs less than it saves."""
        is_large = self._bytes > self._limit or self._bytes_beside > self._limit_beside
        return self._events > _LONG_EVENTS or is_large

    def append(self, now: float, message: Message | None) -> None:
        """An event at this time; None: a deadline has passed."""
        frames = [] if message is None else encode(message)
        beside = self._put_beside(frames[SHARED_FRAMES:])
        self._waiting += _record(msgspec.msgpack.encode((now, frames[:SHARED_FRAMES], beside)))
        self._events += 1

    def flush(self) -> None:
        """Hand to the kernel what was appended, and to the disk once a second. Raises OSError: it is full, say."""
        if self._waiting_beside:  # before the records that say where it is
            self._beside.writelines(self._waiting_beside)
            self._beside.flush()
            self._waiting_beside = []
        if self._waiting:
            self._bytes += sum(map(len, self._waiting))
            self._file.writelines(self._waiting)
            self._file.flush()
            self._waiting = []
            self._is_synced = False

        now = time.monotonic()
        if not self._is_synced and now - self._synced_at >= SYNC_S and self._sync():
            self._synced_at = now
            self._is_synced = True

    def _put_beside(self, arrays: Sequence[bytes | memoryview]) -> _Beside | None:
        """Put large arrays beside the log, for the next `flush`."""
        if not arrays:
            return None
        hashed = xxh3_64()
        offset = self._bytes_beside
        for array in arrays:
            hashed.update(array)
            padding = bytes(-len(array) % _ALIGNMENT)
            self._waiting_beside += (array, padding)
            self._bytes_beside += len(array) + len(padding)
        return _Beside(offset, [len(array) for array in arrays], hashed.intdigest())

    def _sync(self) -> bool:
        """Begin with the next group; False while the disk is busy with the one before. Raises OSError of that one."""
        if self._syncing is not None:
            if not self._syncing.done():
                return False
            self._syncing.result()

        # A descriptor of its own: the log may begin anew meanwhile, and close this file.
        files = [self._beside, self._file] if self._bytes_beside else [self._file]
        self._syncing = self._disk.submit(_sync_and_close, [os.dup(file.fileno()) for file in files])
        return True

    def read(self) -> tuple[Any, Iterator[tuple[float, Message | None]]]:
        """The state and the events since. A last record that its dead writer did not finish is dropped.

        Raises LogDamaged, now or while the events are read.
        """
        records = self._records()
        number, pickled, beside = msgspec.msgpack.decode(next(records), type=tuple[int, bytes, _Beside | None])
        path = self._file_beside(number)
        large = _mapped(path)
        if (arrays := _arrays(large, beside)) is None:
            raise _damaged(path, 0)
        return pickle.loads(pickled, buffers=arrays), _events(records, large, path)

    def remove(self) -> None:
        self._disk.shutdown()
        self._file.close()
        self._beside.close()
        self._path.unlink(missing_ok=True)
        for number in self._files_beside():
            self._file_beside(number).unlink()

    def _records(self) -> Iterator[memoryview]:
        """The content of each."""
        data = memoryview(self._path.read_bytes())
        start = 0
        while (begin := start + _HEAD.size + _CHECK.size) <= len(data):
            head = data[start : start + _HEAD.size]
            size, check = _HEAD.unpack(head)
            whole = digest(head) == _CHECK.unpack(data[begin - _CHECK.size : begin])[0]
            content = data[begin : begin + size]

            if whole and len(content) < size:
                return
            if not whole or digest(content) != check:
                raise _damaged(self._path, start)
            yield content
            start = begin + size

    def _file_beside(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.stem}.columns.{number}")

    def _files_beside(self) -> list[int]:
        """The numbers of the files beside the log: one, and two where a process died as it began a log."""
        return [int(path.suffix[1:]) for path in self._path.parent.glob(f"{self._path.stem}.columns.*")]


def _events(records: Iterator[memoryview], large: memoryview, path: Path) -> Iterator[tuple[float, Message | None]]:
    for record in records:
        now, frames, beside = msgspec.msgpack.decode(record, type=tuple[float, list[bytes], _Beside | None])
        arrays = _arrays(large, beside)
        if beside is not None and arrays is None:
            is_torn = beside.places()[-1].stop > len(large)
            if is_torn and next(records, None) is None:
                return
            raise _damaged(path, beside.offset)
        yield now, decode([*frames, *(arrays or ())]) if frames else None


def _damaged(path: Path, start: int) -> LogDamaged:
    return LogDamaged(f"{path} is damaged at byte {start}: resume=CHECKPOINT begins without it")


def _mapped(path: Path) -> memoryview:
    """The file's content, which stays when it is removed; nothing where there is no file."""
    if not path.exists() or not path.stat().st_size:
        return memoryview(b"")
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _take(buffer: pickle.PickleBuffer, large: list[memoryview]) -> bool:
    """Whether a part of the state stands beside the log. What may be written to stays in the state."""
    view = memoryview(buffer)
    if not (view.readonly and is_large(view)):
        return False
    large.append(buffer.raw())
    return True


def _arrays(large: memoryview, beside: _Beside | None) -> list[memoryview] | None:
    """A record's large arrays; None where they are not what was written."""
    if beside is None:
        return []
    arrays = [large[place] for place in beside.places()]
    hashed = xxh3_64()
    for array in arrays:
        hashed.update(array)
    whole = [len(array) for array in arrays] == beside.sizes and hashed.intdigest() == beside.digest
    return arrays if whole else None


def _sync_and_close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def _record(content: bytes) -> tuple[bytes, bytes, bytes]:
    head = _HEAD.pack(len(content), digest(content))
    return head, _CHECK.pack(digest(head)), content
