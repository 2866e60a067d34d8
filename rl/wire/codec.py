"""Typed structs as frames of a multipart ZeroMQ message: a MessagePack header, then the arrays. Nothing is pickled.

What goes to one peer at one time goes together, as a list: a message for each struct would cost more than its content.
The header is msgspec, validated on decode, and has the protocol version. One frame with all smaller arrays follows, and
one frame per array that is large, or has large entries. Array fields are annotated `np.ndarray`, also within a mapping;
in the header they stand as `(frame index, offset, dtype, shape)`. Decoded arrays are read-only views of the received
frames: copying is the receiver's decision.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from rl.wire.columns import WIRE_DTYPES

PROTOCOL = 3
_JOINED_BYTES = 1 << 16  # smaller arrays share a frame: a copy of them costs less than a frame each
_LARGE_ENTRY_BYTES = 64  # of one token, say; the built-in columns of a token have 13 bytes together
SHARED_FRAMES = 2  # the header and the smaller arrays; what follows are large arrays, one a frame
_ALIGNMENT = 8
MAX_FRAME_BYTES = 1 << 30
"""The limit of one frame: no column of one episode is larger."""
PIECE_BYTES = 16 << 20
"""Of a rank's batch part each frame has at most so much of a column. A connection between machines breaks where a frame
takes longer than a heartbeat may (`rl.wire.sockets`). At 1 Gbit/s one of 1 GiB would never arrive, nor would one of
64 MiB where 18 ranks share that."""

Frames = Sequence[bytes | memoryview]
T = TypeVar("T")


class ProtocolError(ValueError):
    """A frame that does not decode: wrong protocol version, type, dtype or size."""


def is_large(array: memoryview) -> bool:
    """Whether an array has a frame of its own: it is long, or each of its entries is."""
    entry = array.nbytes // len(array) if array.ndim > 1 and array.nbytes else 0
    return array.nbytes >= _JOINED_BYTES or entry >= _LARGE_ENTRY_BYTES


def pieces(array: np.ndarray) -> list[np.ndarray]:
    """The array along its first axis, in as few views as there must be; itself, if it is no longer than a piece."""
    if array.nbytes <= PIECE_BYTES:
        return [array]
    entries = max(1, PIECE_BYTES // (array.nbytes // len(array)))
    return [array[first : first + entries] for first in range(0, len(array), entries)]


class _Buffers(threading.local):
    """Arrays met while encoding (joined, large) or decoding (frames) the message of this thread."""

    joined: list[bytes | memoryview]  # content of frame 1, padding included
    size: int  # of what is joined
    large: list[bytes | memoryview]  # frames 2, 3, ...
    frames: Frames


_buffers = _Buffers()


def _array_to_header(value: object) -> object:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} cannot cross a socket")
    dtype = value.dtype.str
    if dtype not in WIRE_DTYPES:
        raise ProtocolError(f"dtype {value.dtype} is not allowed on the wire")

    size = value.nbytes
    content = np.ascontiguousarray(value).data
    data = content.cast("B") if size else b""
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"an array of {size} bytes is larger than a frame may be ({MAX_FRAME_BYTES} bytes)")
    if is_large(content):
        _buffers.large.append(data)
        return 1 + len(_buffers.large), 0, dtype, value.shape

    offset = _buffers.size
    padding = -size % _ALIGNMENT
    _buffers.joined += (data, bytes(padding)) if padding else (data,)
    _buffers.size = offset + size + padding
    return 1, offset, dtype, value.shape


def _header_to_array(kind: type, value: Any) -> object:
    if kind is not np.ndarray:
        raise NotImplementedError
    index, offset, name, shape = value
    dtype = WIRE_DTYPES.get(name)
    if dtype is None or not 0 < index < len(_buffers.frames):
        raise ProtocolError(f"array frame {index} of dtype {name!r} does not exist")
    if offset < 0 or min(shape, default=0) < 0:  # numpy would read what lies before the frame
        raise ProtocolError(f"an array of shape {shape} at offset {offset} does not exist")
    return np.ndarray(shape, dtype, _buffers.frames[index], offset)  # raises TypeError beyond the frame's end


class _Envelope(Struct, Generic[T], array_like=True):
    protocol: int
    bodies: list[T]


class Codec(Generic[T]):
    """Frames of the messages of one type: a Struct, or a union of tagged ones.

        codec: Codec[Ask | Answer] = Codec(Ask | Answer)
        codec.decode(codec.encode(Ask(1))) == Ask(1)
        codec.decode_all(codec.encode_all([Ask(1), Answer(2)])) == [Ask(1), Answer(2)]

    Without arrays they are one frame.
    """

    def __init__(self, kind: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_array_to_header)
        self._decoder = msgspec.msgpack.Decoder(_Envelope[kind], dec_hook=_header_to_array)

    def encode(self, message: T) -> list[bytes | memoryview]:
        return self.encode_all([message])

    def encode_all(self, messages: list[T]) -> list[bytes | memoryview]:
        """The header, a frame with the smaller arrays, then each large array's buffer (not copied)."""
        joined: list[bytes | memoryview] = []
        large: list[bytes | memoryview] = []
        _buffers.joined = joined
        _buffers.size = 0
        _buffers.large = large

        header = self._encoder.encode(_Envelope(PROTOCOL, messages))

        _buffers.joined = []
        _buffers.large = []
        return [header, b"".join(joined), *large] if joined or large else [header]

    def decode(self, frames: Frames) -> T:
        """The one message of these frames. Raises ProtocolError for anything that is not one."""
        messages = self.decode_all(frames)
        if len(messages) != 1:
            raise ProtocolError(f"not one message but {len(messages)}")
        return messages[0]

    def decode_all(self, frames: Frames) -> list[T]:
        """The messages of these frames. Raises ProtocolError for anything that is none."""
        _buffers.frames = frames
        try:
            envelope: _Envelope[T] = self._decoder.decode(frames[0] if frames else b"")
        except (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise ProtocolError(f"not a message of protocol {PROTOCOL}: {error}") from None
        finally:
            _buffers.frames = ()

        if envelope.protocol != PROTOCOL:
            raise ProtocolError(f"protocol {envelope.protocol}, this side speaks {PROTOCOL}")
        if not envelope.bodies:
            raise ProtocolError("an empty list of messages")
        return envelope.bodies
