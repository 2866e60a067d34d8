"""What the environment server and its game workers say to each other: length-prefixed MessagePack on two pipes."""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

LENGTH = struct.Struct("<I")


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
    return LENGTH.pack(len(body)) + body
