"""What a server and its workers say to each other: length-prefixed MessagePack on two pipes, and the number of the
request that the worker works on in a page of memory that both share."""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any, Generic, TypeVar

import msgspec

CHUNK = 1 << 18  # bytes read at once
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")

Body = TypeVar("Body")
Result = TypeVar("Result")
Read = TypeVar("Read")


class WorkerRequest(msgspec.Struct, Generic[Body], array_like=True):
    """`session`: whose state in the worker the request belongs to; no body: that session has ended."""

    number: int
    session: int
    body: Body | None = None


class WorkerReply(msgspec.Struct, Generic[Result], array_like=True):
    """To the request of this number, in order; number 0: the worker is ready. `error`: why there is no result."""

    number: int
    result: Result | None = None
    error: str = ""


def frame(message: WorkerRequest[Any] | WorkerReply[Any]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[Read]):
    """Messages of one type out of what a pipe gives, however it cuts them."""

    def __init__(self, kind: type[Read]) -> None:
        self._decoder: msgspec.msgpack.Decoder[Read] = msgspec.msgpack.Decoder(kind)
        self._unread = b""

    def feed(self, chunk: bytes) -> list[Read]:
        """The messages that are whole now. Raises msgspec.ValidationError."""
        unread = self._unread + chunk if self._unread else chunk
        messages = []
        begin = 0

        while len(unread) - begin >= _LENGTH.size:
            body = begin + _LENGTH.size
            end = body + _LENGTH.unpack_from(unread, begin)[0]
            if end > len(unread):
                break
            messages.append(self._decoder.decode(unread[body:end]))
            begin = end

        self._unread = unread[begin:]
        return messages


class CurrentRequest:
    """The number of the request that a worker works on, or worked on last; 0 before the first.

    The worker sets it, the server reads it once the worker hangs or is dead.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """A new page, or the one behind an inherited descriptor."""
        if descriptor is None:
            descriptor = os.memfd_create("current_request")
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)

    def close_descriptor(self) -> None:
        """Once the worker has inherited it; the page stays."""
        os.close(self.descriptor)

    def set(self, number: int) -> None:
        _NUMBER.pack_into(self._page, 0, number)

    def get(self) -> int:
        return int(_NUMBER.unpack_from(self._page, 0)[0])
