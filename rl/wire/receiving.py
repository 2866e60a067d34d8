"""How every process receives: a bounded number of messages a turn, and one answer to what is no message.

`Receiver` is for poll loops, `Port` for asyncio. Both hand each message to the handler of its socket, with the
sender's identity (empty unless the socket is a ROUTER). A handler raises ProtocolError for a message that makes no
sense from this sender. That, and frames that are no message, are dropped and counted by a `Malformed`, so that they
cost their sender an answer and nobody a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import zmq

from rl.wire.codec import Codec
from rl.wire.messages import Message, ProtocolError, codec
from rl.wire.sockets import Connection, close_at_once, made_again, receive_frames, send_all

M = TypeVar("M")
Handler = Callable[[M, bytes], None]
MESSAGES_PER_TURN = 512  # of one socket, so that none starves the others; several that came as one count as one
_QUIET_S = 10.0  # between two lines on the same kind of what was dropped
_MESSAGES_PER_CALLBACK = 64  # likewise
_POLLIN = int(zmq.POLLIN)  # plain numbers: enums are slow to combine


class Malformed:
    """Drops what is no message, and counts it. Each kind, which is an error's first word, has a line now and then."""

    def __init__(self, owner: str) -> None:
        self.count = 0
        self._owner = owner
        self._logged: dict[str, tuple[float, int]] = {}  # kind -> when it may be logged again, how many came since

    def __call__(self, error: ProtocolError) -> None:
        self.count += 1
        text = f"{error!s:.300}"
        kind = text.partition(" ")[0]
        quiet_until, since = self._logged.get(kind, (0.0, 0))

        now = time.monotonic()
        if now < quiet_until:
            self._logged[kind] = quiet_until, since + 1
            return
        self._logged[kind] = now + _QUIET_S, 0
        more = f" (and {since} like it before)" if since else ""
        print(f"{self._owner}: dropped message {self.count}: {text}{more}", file=sys.stderr, flush=True)


class Receiver(Generic[M]):
    """The sockets of a poll loop, drained in the order in which they are given.

        receiver = Receiver({self._backend: self._from_generator}, Malformed("proxy"), process.wake_fd)
        while not process.stopping:
            receiver.wait(0.1)
            receiver.drain()

    `wake_fd` ends a wait as well; its owner reads it. At most `limit` messages of each socket are handled in a turn.
    `again` is for sockets that connect, whether they receive or not: it is called when their connection has been made
    again. `codec` is that of the messages on these sockets, where they are not those of `rl.wire.messages`.
    """

    def __init__(
        self,
        handlers: Mapping[zmq.SyncSocket, Handler[M]],
        malformed: Malformed,
        wake_fd: int | None = None,
        limit: int = MESSAGES_PER_TURN,
        again: Mapping[zmq.SyncSocket, Callable[[], None]] | None = None,
        codec: Codec[Any] = codec,
    ) -> None:
        self._connections = [each for each in handlers if isinstance(each, Connection)]
        self._sources = [(socket, handle, socket.type == zmq.ROUTER) for socket, handle in handlers.items()]
        self._again = {socket: call for socket, call in (again or {}).items() if isinstance(socket, Connection)}
        self._malformed = malformed
        self._limit = limit
        self._codec: Codec[M] = codec

        self._poller = zmq.Poller()
        for source in handlers if wake_fd is None else (wake_fd, *handlers):
            self._poller.register(source, zmq.POLLIN)
        for connection in self._again:
            self._poller.register(connection.news, zmq.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait until a message has arrived, `wake_fd` is readable or the time is over (then False)."""
        return bool(self._poller.poll(int(1000 * seconds)))

    def drain(self) -> None:
        """Handle what has arrived. Raises what a handler raises."""
        for each in self._connections:
            each.follow()
        for connection, call in self._again.items():
            if connection.made_again():
                call()

        for socket, handle, addressed in self._sources:
            for _ in range(self._limit):
                if not _take(socket, handle, addressed, self._malformed, self._codec):
                    break


class Outgoing:
    """Messages to one peer, on the asyncio loop: what is sent within one turn of the loop leaves as one, at its end.

    What the socket raises goes to `failed`. `left` is called after each time that something has left.
    """

    def __init__(
        self, socket: zmq.SyncSocket, failed: Callable[[Exception], None], left: Callable[[], None] = lambda: None
    ) -> None:
        self._socket = socket
        self._failed = failed
        self._left = left
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Message] = []

    def send(self, message: Message) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(message)

    def close(self, *, peer_died: bool = False) -> None:
        if peer_died:
            self._waiting.clear()
            close_at_once(self._socket)
        else:
            self._flush()
            self._socket.close()

    def _flush(self) -> None:
        messages = self._waiting
        self._waiting = []
        if not messages or self._socket.closed:
            return
        try:
            send_all(self._socket, messages)
        except Exception as error:
            self._failed(error)
            return
        self._left()


class Port:
    """A socket on the asyncio loop. What its handler raises goes to `failed`. `again` is called when its connection has
    been made again.

    The file descriptor of a ZeroMQ socket is edge-triggered and any operation may consume the edge, so after each one
    the socket is asked again whether it is readable.
    """

    def __init__(
        self,
        socket: zmq.SyncSocket,
        handle: Handler[Message],
        malformed: Malformed,
        failed: Callable[[Exception], None],
        again: Callable[[], None] | None = None,
    ) -> None:
        self._socket = socket
        self._addressed = socket.type == zmq.ROUTER
        self._handle = handle
        self._malformed = malformed
        self._failed = failed

        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self._scheduled = False
        self._outgoing = Outgoing(socket, failed, self._schedule)
        self._loop.add_reader(self._descriptor, self._drain)

        self._connection = socket if isinstance(socket, Connection) else None
        if self._connection is not None:
            self._connection.addresses.watch(self._hear)
        self._again = again
        self._news = socket.news.fileno() if again is not None and isinstance(socket, Connection) else None
        if self._news is not None:
            self._loop.add_reader(self._news, self._look)
            self._look()  # as with every socket: who has never looked is not told
        self._schedule()

    def send(self, message: Message) -> None:
        self._outgoing.send(message)

    def close(self, *, peer_died: bool = False) -> None:
        """`peer_died`: another socket of this name meets its successor, and this one must not reach it as well."""
        if self._connection is not None:
            self._connection.addresses.unwatch(self._hear)
        self._loop.remove_reader(self._descriptor)
        if self._news is not None:
            self._loop.remove_reader(self._news)
        self._outgoing.close(peer_died=peer_died)

    def _hear(self) -> None:
        """To be called by another thread; the loop may have ended meanwhile."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._follow)

    def _follow(self) -> None:
        if self._connection is not None and not self._connection.closed:
            self._connection.follow()
            self._schedule()

    def _look(self) -> None:
        if self._again is not None and made_again(self._socket):
            self._again()

    def _schedule(self) -> None:
        if not self._scheduled and self._readable():
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _readable(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def _drain(self) -> None:
        """A few messages, so that other callbacks run between them."""
        self._scheduled = False
        try:
            for _ in range(_MESSAGES_PER_CALLBACK):
                if not self._readable():
                    return
                _take(self._socket, self._handle, self._addressed, self._malformed, codec)
        except Exception as error:
            self._failed(error)
        self._schedule()


def _take(socket: zmq.SyncSocket, handle: Handler[M], addressed: bool, malformed: Malformed, codec: Codec[M]) -> bool:
    """Handle what comes next, one message or several that came as one; False if there is nothing."""
    try:
        frames = receive_frames(socket)
    except zmq.Again:
        return False

    peer = bytes(frames.pop(0)) if addressed else b""
    try:
        messages = codec.decode_all(frames)
    except ProtocolError as error:
        malformed(error)
        return True

    for message in messages:
        try:
            handle(message, peer)
        except ProtocolError as error:
            malformed(error)
    return True
