"""How every process receives: a bounded number of messages a turn, and one answer to what is no message.

`Receiver` is for poll loops, `Port` for asyncio. Both hand each message to the handler of its socket, with the
sender's identity (empty unless the socket is a ROUTER). A handler raises ProtocolError for a message that makes no
sense from this sender. That, and frames that are no message, go to `malformed`: a `Malformed` drops and counts them, so
that they cost their sender an answer and not everyone the process; `fatal` is for peers that are trusted.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping

import zmq

from rl.core.messages import Message, ProtocolError, decode
from rl.core.sockets import receive_frames, send

Handler = Callable[[Message, bytes], None]
OnMalformed = Callable[[ProtocolError], None]

MESSAGES_PER_TURN = 512  # of one socket, so that none starves the others
_LOGGED = 20  # of the messages dropped; then every thousandth
_MESSAGES_PER_CALLBACK = 64


class Malformed:
    """Drops what is no message; counts it, and logs it at a limited rate."""

    def __init__(self, owner: str) -> None:
        self.count = 0
        self._owner = owner

    def __call__(self, error: ProtocolError) -> None:
        self.count += 1
        if self.count <= _LOGGED or self.count % 1000 == 0:
            print(f"{self._owner}: dropped message {self.count}: {error!s:.300}", file=sys.stderr, flush=True)


def fatal(error: ProtocolError) -> None:
    """A malformed message of a trusted peer is a bug: the process ends."""
    raise error


class Receiver:
    """The sockets of a poll loop, drained in the order in which they are given.

        receiver = Receiver({self._backend: self._from_generator}, Malformed("proxy"), process.wake_fd)
        while not process.stopping:
            receiver.wait(0.1)
            receiver.drain()

    `wake_fd` ends a wait as well; its owner reads it. At most `limit` messages of each socket are handled in a turn.
    """

    def __init__(
        self,
        handlers: Mapping[zmq.SyncSocket, Handler],
        malformed: OnMalformed,
        wake_fd: int | None = None,
        limit: int = MESSAGES_PER_TURN,
    ) -> None:
        self._sources = [(socket, handle, socket.type == zmq.ROUTER) for socket, handle in handlers.items()]
        self._malformed = malformed
        self._limit = limit

        self._poller = zmq.Poller()
        for source in handlers if wake_fd is None else (wake_fd, *handlers):
            self._poller.register(source, zmq.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Until a message has arrived, `wake_fd` is readable or the time is over (then False)."""
        return bool(self._poller.poll(int(1000 * seconds)))

    def drain(self) -> None:
        """Handle what has arrived. Raises what a handler raises."""
        for socket, handle, addressed in self._sources:
            for _ in range(self._limit):
                if not _take(socket, handle, addressed, self._malformed):
                    break


class Port:
    """A socket on the asyncio loop. What its handler raises goes to `failed`.

    The file descriptor of a ZeroMQ socket is edge-triggered and any operation may consume the edge, so after each one
    the socket is asked again whether it is readable.
    """

    def __init__(
        self, socket: zmq.SyncSocket, handle: Handler, malformed: OnMalformed, failed: Callable[[Exception], None]
    ) -> None:
        self._socket = socket
        self._handle = handle
        self._malformed = malformed
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self._scheduled = False
        self._loop.add_reader(self._descriptor, self._drain)
        self._schedule()

    def send(self, message: Message) -> None:
        send(self._socket, message)
        self._schedule()

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _schedule(self) -> None:
        if not self._scheduled and self._readable():
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _readable(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _drain(self) -> None:
        """A few messages, so that other callbacks run between them."""
        self._scheduled = False
        try:
            for _ in range(_MESSAGES_PER_CALLBACK):
                if not self._readable():
                    return
                _take(self._socket, self._handle, False, self._malformed)
        except Exception as error:
            self._failed(error)
        self._schedule()


def _take(socket: zmq.SyncSocket, handle: Handler, addressed: bool, malformed: OnMalformed) -> bool:
    """Handle the next message; False if there is none."""
    try:
        frames = receive_frames(socket)
    except zmq.Again:
        return False

    peer = bytes(frames.pop(0)) if addressed else b""
    try:
        handle(decode(frames), peer)
    except ProtocolError as error:
        malformed(error)
    return True
