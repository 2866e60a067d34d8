"""Messages one by one for tests that play a peer: several may have come as one."""

from __future__ import annotations

import time
from collections import deque
from weakref import WeakKeyDictionary

import zmq

from experiments.bench._inbox import receive_all
from rl.wire.messages import Message

_taken: WeakKeyDictionary[zmq.SyncSocket, deque[tuple[bytes, Message]]] = WeakKeyDictionary()
"""What has come with an earlier message of the same socket."""


def arrived(socket: zmq.SyncSocket) -> list[tuple[bytes, Message]]:
    """All that is there now, with its sender where the socket is a ROUTER."""
    found = list(_taken.pop(socket, ()))
    while socket.poll(0):
        found += receive_all(socket)
    return found


def next_from(socket: zmq.SyncSocket, timeout_s: float) -> tuple[bytes, Message] | None:
    """The next message and its sender; None if there is none in time."""
    waiting = _taken.setdefault(socket, deque())
    deadline = time.monotonic() + timeout_s
    while not waiting:
        if not socket.poll(int(1000 * max(0.0, deadline - time.monotonic()))):
            return None
        waiting += receive_all(socket)
    return waiting.popleft()
