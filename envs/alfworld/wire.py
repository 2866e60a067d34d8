"""What the environment server and its game workers say to each other: length-prefixed MessagePack on two pipes, and the
number of the request that the worker works on in a page that both share."""

from __future__ import annotations

import mmap
import os
import struct
from typing import Generic, Literal, TypeVar

import msgspec

CHUNK = 1 << 18  # bytes read at once
_LENGTH = struct.Struct("<I")
_SEQ = struct.Struct("<Q")


class Request(msgspec.Struct, array_like=True):
    """`argument`: of `load` the game file, of `step` the command; `end` gives the episode's engine back."""

    seq: int
    op: Literal["load", "step", "end"]
    episode: int
    argument: str = ""


class Reply(msgspec.Struct, array_like=True):
    """Answer to the request of this number, in order; `error` says why there is no observation."""

    seq: int
    text: str = ""
    commands: tuple[str, ...] = ()  # those admitted now, if the worker lists them
    won: bool = False
    admissible: bool = True  # the command changed the game's state or was at least understood
    error: str = ""


def frame(message: Request | Reply) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


Read = TypeVar("Read", Request, Reply)


class Inbox(Generic[Read]):
    """Messages of one type out of what a pipe gives, however it cuts them."""

    def __init__(self, kind: type[Read]) -> None:
        self._decoder: msgspec.msgpack.Decoder[Read] = msgspec.msgpack.Decoder(kind)
        self._unread = b""

    def feed(self, chunk: bytes) -> list[Read]:
        """The messages that are whole now. Raises msgspec.ValidationError."""
        unread = self._unread + chunk if self._unread else chunk
        begin, size, messages = 0, len(unread), []
        while size - begin >= _LENGTH.size:
            body = begin + _LENGTH.size
            end = body + _LENGTH.unpack_from(unread, begin)[0]
            if end > size:
                break
            messages.append(self._decoder.decode(unread[body:end]))
            begin = end
        self._unread = unread[begin:]
        return messages


class Position:
    """The number of the request that a worker works on, or worked on last; 0 before the first. The worker sets it, the
    server reads it once the worker hangs or is dead. `descriptor` is open until `close_descriptor`."""

    def __init__(self, descriptor: int | None = None) -> None:
        """A new page, or the one behind an inherited descriptor."""
        if descriptor is None:
            descriptor = os.memfd_create("alfworld_position")
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self.descriptor = descriptor
        self._page = mmap.mmap(descriptor, mmap.PAGESIZE)

    def close_descriptor(self) -> None:
        os.close(self.descriptor)

    def set(self, seq: int) -> None:
        _SEQ.pack_into(self._page, 0, seq)

    def get(self) -> int:
        return int(_SEQ.unpack_from(self._page, 0)[0])
