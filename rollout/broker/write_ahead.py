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
a thread beside the loop: of a machine's death the run recovers from a checkpoint, and the disk is not waited for.
"""

from __future__ import annotations

import os
import pickle
import struct
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest as digest

from rl.config.failures import EndsRun
from rl.wire.messages import Message, decode, encode

_HEAD = struct.Struct("<QQ")
_CHECK = struct.Struct("<Q")
_LONG_BYTES = 64 << 20
_LONG_EVENTS = 50_000  # a second or two to read again
SYNC_S = 1.0


class LogDamaged(EndsRun, RuntimeError):
    """One line with the path and what to do."""

    one_line = True


class WriteAheadLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[bytes] = []
        self._events = 0
        self._bytes = 0

        self._disk = ThreadPoolExecutor(1, "sync of the log")
        self._syncing: Future[None] | None = None
        self._synced_at = 0.0
        self._is_synced = True

    def exists(self) -> bool:
        return self._path.exists()

    def begin(self, state: Any) -> None:
        """From now on the log is this state and what follows."""
        partial = self._path.with_suffix(".tmp")
        self._file = partial.open("wb")
        self._waiting = [*_record(pickle.dumps(state, pickle.HIGHEST_PROTOCOL))]
        self.flush()
        partial.replace(self._path)
        self._events = 0
        self._limit = _LONG_BYTES + 2 * self._bytes
        self._bytes = 0

    @property
    def is_long(self) -> bool:
        """Beginning anew costs less than it saves."""
        return self._events > _LONG_EVENTS or self._bytes > self._limit

    def append(self, now: float, message: Message | None) -> None:
        """An event at this time; None: a deadline has passed."""
        frames = [] if message is None else encode(message)
        self._waiting += _record(msgspec.msgpack.encode((now, frames)))
        self._events += 1

    def flush(self) -> None:
        """Hand to the kernel what was appended, and to the disk once a second. Raises OSError: it is full, say."""
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

    def _sync(self) -> bool:
        """Begin with the next group; False while the disk is busy with the one before. Raises OSError of that one."""
        if self._syncing is not None:
            if not self._syncing.done():
                return False
            self._syncing.result()

        # A descriptor of its own: the log may begin anew meanwhile, and close this file.
        self._syncing = self._disk.submit(_sync_and_close, os.dup(self._file.fileno()))
        return True

    def read(self) -> tuple[Any, Iterator[tuple[float, Message | None]]]:
        """The state and the events since. A last record that its dead writer did not finish is dropped.

        Raises LogDamaged, now or while the events are read.
        """
        contents = self._contents()
        return pickle.loads(next(contents)), map(_event, contents)

    def remove(self) -> None:
        self._disk.shutdown()
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _contents(self) -> Iterator[memoryview]:
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
                raise LogDamaged(f"{self._path} is damaged at byte {start}: resume=CHECKPOINT begins without it")
            yield content
            start = begin + size


def _sync_and_close(descriptor: int) -> None:
    try:
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _record(content: bytes) -> tuple[bytes, bytes, bytes]:
    head = _HEAD.pack(len(content), digest(content))
    return head, _CHECK.pack(digest(head)), content


def _event(content: memoryview) -> tuple[float, Message | None]:
    now, frames = msgspec.msgpack.decode(content, type=tuple[float, list[bytes]])
    return now, decode(frames) if frames else None
