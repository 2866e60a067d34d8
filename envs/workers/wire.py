"""What a server and its workers say to each other.

Frames of the codec, each after its length, on two pipes; and, in a page of memory that both share, the number of the
request that the worker works on.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any, Generic, TypeVar

import msgspec

from rl.wire.codec import Codec

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
    """The reply to the request of this number, in order; number 0: the worker is ready. `error`: why there is no
    result."""

    number: int
    result: Result | None = None
    error: str = ""


_CODEC: Codec[Any] = Codec(Any)


def frame(message: WorkerRequest[Any] | WorkerReply[Any]) -> bytes:
    """The message, which has no arrays, as one frame of the codec, after its length."""
    (body,) = _CODEC.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader(Generic[Read]):
    """Messages of one type out of what a pipe gives, however it cuts them."""

    def __init__(self, kind: type[Read]) -> None:
        self._codec: Codec[Read] = Codec(kind)
        self._unread = b""

    def feed(self, chunk: bytes) -> list[Read]:
        """The messages that are whole now. Raises ProtocolError."""
        unread = self._unread + chunk if self._unread else chunk
        messages = []
        begin = 0

        while len(unread) - begin >= _LENGTH.size:
            body = begin + _LENGTH.size
            end = body + _LENGTH.unpack_from(unread, begin)[0]
            if end > len(unread):
                break
            messages.append(self._codec.decode([unread[body:end]]))
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
        """To be called once the worker has inherited it; the page stays."""
        os.close(self.descriptor)

    def set(self, number: int) -> None:
        _NUMBER.pack_into(self._page, 0, number)

    def get(self) -> int:
        return int(_NUMBER.unpack_from(self._page, 0)[0])
