"""The broker's write-ahead log: its state at one moment, and every event since. After its death it goes on from there.

    log = WriteAheadLog(path, key)
    if log.exists():                 # of an earlier incarnation
        kept, events = log.read()
    log.begin(keep(intake))          # replaces what is there, at once
    log.append(now, message)         # every event, before it changes anything outside
    log.flush()                      # before anything leaves that follows from it; in every turn of the loop

The file begins with its format, a salt, and the number of records that stand in it. A record is a head (length and
tag of the content, xxh3 of both) and its content, MessagePack. The first holds the state (`kept.py`), the others a
time, and all of them the frames of messages.

The tag is a MAC (GMAC) under a key of the run and the salt, with the number of the record. So only who has the run's
key can write a log that is read, and no record can be left out, moved or taken from another log. The number has one
too, and is written after the records: a log that was cut is seen to be, and one that its writer did not finish is not.

What is written survives the process at once. It is synced to the disk in groups, a second's records each, by a thread
beside the loop. Nobody waits for the disk: after a machine's death the run recovers from a checkpoint.

Large arrays, such as columns with hundreds of bytes a token, stay out of the log. They stand in a file beside it, which
only grows: the record says where, and has their tags. They are written before their record, so that a record that
is whole has all of them. A log that begins anew begins a new file, and the old one goes with the old log.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_64_intdigest as digest

from rl.config.failures import EndsRun
from rl.wire.codec import SHARED_FRAMES
from rl.wire.messages import Frames, Message, decode, decode_all, encode, encode_all
from rollout.broker.kept import Kept

_FORMAT = b"fresco's write-ahead log, format 3\n"
_SALT_BYTES = 32
_TAG_BYTES = 16
_COUNT = struct.Struct(f"<Q{_TAG_BYTES}s")  # of the records, behind format and salt
_COUNT_AT = len(_FORMAT) + _SALT_BYTES
_BEGIN = _COUNT_AT + _COUNT.size
_NONCE = struct.Struct("<QI")  # number of the record, and of an array of it; 0: the record itself
_ALL = 0xFFFFFFFF  # in the place of an array: how many records there are
_HEAD = struct.Struct(f"<Q{_TAG_BYTES}s")
_CHECK = struct.Struct("<Q")
_LONG_BYTES = 64 << 20
_LONG_BYTES_BESIDE = 1 << 30
_LONG_EVENTS = 50_000  # a second or two to read again
_BYTES_OF_AN_EVENT = 100
"""Of the state: a sample that may be taken back is some 300 bytes, was three events, and takes as long to write."""
_ALIGNMENT = 8  # of arrays beside the log
SYNC_S = 1.0


class LogDamaged(EndsRun, RuntimeError):
    """One line with the path and what to do."""

    one_line = True


class _Beside(msgspec.Struct, array_like=True):
    """Where a record's large arrays stand, one behind the other."""

    offset: int
    sizes: list[int]
    tags: list[bytes]

    def places(self) -> list[slice]:
        places = []
        start = self.offset
        for size in self.sizes:
            places.append(slice(start, start + size))
            start += size + -size % _ALIGNMENT
        return places


class _Seal:
    """Tags of the records of one file, each of which has its number."""

    def __init__(self, key: bytes, salt: bytes) -> None:
        self._cipher = AESGCM(hashlib.blake2b(salt, key=key, digest_size=32, person=b"broker.log").digest())

    def tag(self, content: bytes | memoryview, record: int, array: int = 0) -> bytes:
        return self._cipher.encrypt(_NONCE.pack(record, array), b"", content)

    def fits(self, tag: bytes, content: bytes | memoryview, record: int, array: int = 0) -> bool:
        try:
            self._cipher.decrypt(_NONCE.pack(record, array), tag, content)
        except InvalidTag:
            return False
        return True


_First = tuple[tuple[int, Any], list[bytes], _Beside | None]


class WriteAheadLog:
    """`key`: secret bytes of the run."""

    def __init__(self, path: Path, key: bytes) -> None:
        self._path = path
        self._key = key
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

    def begin(self, kept: Kept) -> None:
        """From now on the log is this state and what follows."""
        earlier = self._files_beside()
        beside = 1 + max(earlier, default=0)
        self._beside = _open_new(self._file_beside(beside))
        self._bytes = self._bytes_beside = 0  # of the state alone, from here on
        partial = self._path.with_suffix(".tmp")
        self._file = _open_new(partial)

        salt = secrets.token_bytes(_SALT_BYTES)
        self._seal = _Seal(self._key, salt)
        self._number = 0
        self._waiting = [_FORMAT, salt, bytes(_COUNT.size)]
        self._add((beside, kept.state), encode_all(kept.messages) if kept.messages else [])
        self.flush()
        partial.replace(self._path)
        for number in earlier:
            self._file_beside(number).unlink()

        self._events = 0
        self._limit_events = _LONG_EVENTS + self._bytes // _BYTES_OF_AN_EVENT
        self._limit = _LONG_BYTES + 2 * self._bytes
        self._limit_beside = _LONG_BYTES_BESIDE + 2 * self._bytes_beside
        self._bytes = 0

    @property
    def is_long(self) -> bool:
        """Beginning anew costs less than it saves."""
        is_large = self._bytes > self._limit or self._bytes_beside > self._limit_beside
        return self._events > self._limit_events or is_large

    def append(self, now: float, message: Message | None) -> None:
        """An event at this time; None: a deadline has passed."""
        self._add(now, [] if message is None else encode(message))
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
            count = _COUNT.pack(self._number, self._seal.tag(b"", self._number, _ALL))
            os.pwrite(self._file.fileno(), count, _COUNT_AT)
            self._is_synced = False

        now = time.monotonic()
        if not self._is_synced and now - self._synced_at >= SYNC_S and self._sync():
            self._synced_at = now
            self._is_synced = True

    def _add(self, what: Any, frames: Frames) -> None:
        """A record of this and the frames of messages, for the next `flush`."""
        content = msgspec.msgpack.encode((what, frames[:SHARED_FRAMES], self._put_beside(frames[SHARED_FRAMES:])))
        head = _HEAD.pack(len(content), self._seal.tag(content, self._number))
        self._waiting += (head, _CHECK.pack(digest(head)), content)
        self._number += 1

    def _put_beside(self, arrays: Frames) -> _Beside | None:
        """Put large arrays of the next record beside the log, for the next `flush`."""
        if not arrays:
            return None
        offset = self._bytes_beside
        tags = [self._seal.tag(array, self._number, index) for index, array in enumerate(arrays, 1)]
        for array in arrays:
            padding = bytes(-len(array) % _ALIGNMENT)
            self._waiting_beside += (array, padding)
            self._bytes_beside += len(array) + len(padding)
        return _Beside(offset, [len(array) for array in arrays], tags)

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

    def read(self) -> tuple[Kept, Iterator[tuple[float, Message | None]]]:
        """The state and the events since. A last record that its dead writer did not finish is dropped.

        Raises LogDamaged, now or while the events are read.
        """
        data = memoryview(self._path.read_bytes())
        if data[: len(_FORMAT)] != _FORMAT or len(data) < _BEGIN:
            what = "is damaged, or an earlier version of Fresco wrote it, in a format that is not read any more"
            raise LogDamaged(f"{self._path} {what}: resume=CHECKPOINT begins without it")

        seal = _Seal(self._key, bytes(data[len(_FORMAT) : _COUNT_AT]))
        count, tag = _COUNT.unpack(data[_COUNT_AT:_BEGIN])
        if not seal.fits(tag, b"", count, _ALL):
            raise _damaged(self._path, _COUNT_AT)
        records = self._records(data, count, seal)
        if (first := next(records, None)) is None:
            raise _damaged(self._path, _BEGIN)

        (number, state), frames, beside = msgspec.msgpack.decode(first, type=_First)
        path = self._file_beside(number)
        large = _mapped(path)
        if (arrays := _arrays(large, beside, seal, 0)) is None:
            raise _damaged(path, 0)
        messages = decode_all([*frames, *arrays]) if frames else []
        return Kept(state, messages), _events(records, count, large, path, seal)

    def remove(self) -> None:
        self._disk.shutdown()
        self._file.close()
        self._beside.close()
        self._path.unlink(missing_ok=True)
        for number in self._files_beside():
            self._file_beside(number).unlink()

    def _records(self, data: memoryview, count: int, seal: _Seal) -> Iterator[memoryview]:
        """The content of each; there must be `count`."""
        start = _BEGIN
        for number in itertools.count():
            if (begin := start + _HEAD.size + _CHECK.size) > len(data):
                break
            head = data[start : start + _HEAD.size]
            size, tag = _HEAD.unpack(head)
            whole = digest(head) == _CHECK.unpack(data[begin - _CHECK.size : begin])[0]
            content = data[begin : begin + size]

            if whole and len(content) < size:
                break
            if not whole or not seal.fits(tag, content, number):
                raise _damaged(self._path, start)
            yield content
            start = begin + size

        if number < count:
            raise _damaged(self._path, len(data))

    def _file_beside(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.stem}.columns.{number}")

    def _files_beside(self) -> list[int]:
        """The numbers of the files beside the log: one, and two where a process died as it began a log."""
        return [int(path.suffix[1:]) for path in self._path.parent.glob(f"{self._path.stem}.columns.*")]


def _events(
    records: Iterator[memoryview], count: int, large: memoryview, path: Path, seal: _Seal
) -> Iterator[tuple[float, Message | None]]:
    for number, record in enumerate(records, 1):
        now, frames, beside = msgspec.msgpack.decode(record, type=tuple[float, list[bytes], _Beside | None])
        arrays = _arrays(large, beside, seal, number)
        if beside is not None and arrays is None:
            is_torn = number >= count and beside.places()[-1].stop > len(large)
            if is_torn and next(records, None) is None:
                return
            raise _damaged(path, beside.offset)
        yield now, decode([*frames, *(arrays or ())]) if frames else None


def _open_new(path: Path) -> IO[bytes]:
    """An empty file that only its owner can read."""
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _damaged(path: Path, start: int) -> LogDamaged:
    return LogDamaged(f"{path} is damaged at byte {start}: resume=CHECKPOINT begins without it")


def _mapped(path: Path) -> memoryview:
    """The file's content, which stays when it is removed; nothing where there is no file."""
    if not path.exists() or not path.stat().st_size:
        return memoryview(b"")
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _arrays(large: memoryview, beside: _Beside | None, seal: _Seal, record: int) -> list[memoryview] | None:
    """A record's large arrays; None where they are not what was written."""
    if beside is None:
        return []
    arrays = [large[place] for place in beside.places()]
    tagged = zip(beside.tags, arrays, strict=True)
    whole = all(seal.fits(tag, array, record, index) for index, (tag, array) in enumerate(tagged, 1))
    return arrays if whole else None


def _sync_and_close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
