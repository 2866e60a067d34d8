"""Messages one by one, for whoever plays a peer in a bench or a test; processes of a run have `rl.wire.receiving`."""

from __future__ import annotations

import zmq

from rl.wire.messages import Message, decode, decode_all
from rl.wire.sockets import receive_frames


def receive_all(socket: zmq.SyncSocket) -> list[tuple[bytes, Message]]:
    """What comes next, one message or several that came as one, with its sender where the socket is a ROUTER.

    Never blocks: raises zmq.Again if there is nothing.
    """
    frames = receive_frames(socket)
    peer = bytes(frames.pop(0)) if socket.type == zmq.ROUTER else b""
    return [(peer, message) for message in decode_all(frames)]


def receive(socket: zmq.SyncSocket) -> Message:
    """The next message, where each comes alone. Never blocks: raises zmq.Again if there is none."""
    frames = receive_frames(socket)
    return decode(frames[1:] if socket.type == zmq.ROUTER else frames)


def receive_from(socket: zmq.SyncSocket) -> tuple[bytes, Message]:
    """The next message of a ROUTER and its sender's identity, where each comes alone."""
    peer, *frames = receive_frames(socket)
    return bytes(peer), decode(frames)
