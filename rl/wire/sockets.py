"""ZeroMQ sockets as every process opens them: limits, linger, heartbeats, the run's key, and typed messages.

A run has one CURVE key pair, in a file that only its owner can read. Both ends of every connection use it, over ipc and
tcp. Who does not have it is refused in the handshake, before any message, and can neither read nor pose as a peer.
Within the run every message comes over a ROUTER, which knows its peers by their identities: names with a proof
(`rl.wire.names`). A dead process loses what was in flight to it, so whatever must not be lost is acknowledged and sent
again by its sender.

A connection that breaks is made again by ZeroMQ, which tells nobody; what was on its way in either direction is lost.
So every socket that connects counts its handshakes (`made_again`). Then whoever owns it says anew what it holds and
asks for, as it does to the successor of a process that died.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from pathlib import Path

import zmq

from rl.wire.addresses import Addresses
from rl.wire.codec import MAX_FRAME_BYTES
from rl.wire.messages import Frames, Message, encode, encode_all
from rl.wire.run import KEY_FILE, RunFile, socket_name

_SEAL_BYTES = 33  # that CURVE adds to a frame
HIGH_WATER_MARK = 100_000  # messages; senders count what is under way, so that no socket has to block
# Plain numbers: enums are slow to combine.
_DONTWAIT = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
_COPIED_BYTES = 1 << 14  # smaller frames share a receive buffer: a view would keep it alive, and may be unaligned
_TOGETHER = 256  # messages at most, so that a receiver's turn has an end
_UNIQUE = itertools.count()
_CLOSE_S = 5.0  # what ZeroMQ's thread may take to close a connection; it takes a millisecond


class PeerGone(ConnectionError):
    """A ROUTER was asked to send to a peer that is not connected."""


def make_curve_key(folder: Path, name: str = KEY_FILE) -> None:
    """The run's key pair, readable by the owner only. Its public half is secret as well: to know it is to be a peer."""
    descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(b"\n".join(zmq.curve_keypair()))


def secret(run: RunFile, purpose: bytes) -> bytes:
    """32 bytes that only who has the run's key can know, for one purpose (at most 16 bytes long)."""
    key = (run.folder / KEY_FILE).read_bytes()
    return hashlib.blake2b(key, digest_size=32, person=purpose).digest()


def _secure(socket: zmq.SyncSocket, run: RunFile, *, server: bool) -> None:
    public, secret = run.curve_key()
    socket.curve_publickey = public
    socket.curve_secretkey = secret
    if server:
        socket.curve_server = True
    else:
        socket.curve_serverkey = public


class Connection(zmq.Socket[bytes]):
    """A socket that connects to one other, wherever that is.

    Until somebody knows where, it keeps what is sent. When a successor is bound elsewhere it connects there, which is a
    connection made again.
    """

    _handshakes = 0  # pyzmq wants the attributes of a socket declared
    _run: RunFile
    _name = ""
    _endpoint: str | None = None
    _changes = -1  # of the addresses, when it looked
    _held: list[Frames]
    addresses: Addresses
    """The addresses whose changes it follows."""
    news: zmq.SyncSocket
    """A socket that is readable when `made_again` may have something to say."""

    def reach(self, run: RunFile, name: str) -> None:
        """Send from now on to the socket of this name."""
        self._run = run
        self._name = name
        self._held = []
        self.addresses = run.addresses
        self._look()

    def follow(self) -> None:
        """Look where it is. Called before whatever is sent, and by whoever waits for what it receives."""
        if self._changes != self.addresses.changes:
            self._look()

    def _look(self) -> None:
        self._changes = self.addresses.changes
        endpoint = self._run.address_of(self._name)
        if endpoint is None or endpoint == self._endpoint:
            return

        if self._endpoint is not None:
            self.disconnect(self._endpoint)
        self._endpoint = endpoint
        self.connect(endpoint)
        held, self._held = self._held, []
        for frames in held:
            send_frames(self, frames)

    def holds(self, frames: Frames) -> bool:
        """Whether these are kept, because nobody knows yet where they go."""
        self.follow()
        if self._endpoint is None:
            self._held.append(frames)
        return self._endpoint is None

    def count_handshakes(self) -> None:
        """Count handshakes from now on; to be called before it connects."""
        address = f"inproc://handshakes-{next(_UNIQUE)}"
        self.monitor(address, zmq.EVENT_HANDSHAKE_SUCCEEDED)
        # Not by `context.socket`: whoever destroys the context must not close it before this socket, which does so.
        self.news = zmq.Socket(self.context, zmq.PAIR)
        self.news.rcvhwm = 0  # ZeroMQ's own thread writes here, and must never wait for somebody to read
        self.news.connect(address)

    def made_again(self) -> bool:
        """Whether the connection broke and was made again since the last call."""
        self.follow()
        before = self._handshakes
        while self.news.poll(0):
            self.news.recv_multipart()
            self._handshakes += 1
        return self._handshakes > max(before, 1)

    def close(self, linger: int | None = None) -> None:
        if not self.closed:
            self.disable_monitor()  # first: an event that nobody can take would stop ZeroMQ's thread
        super().close(linger)
        self.news.close(linger=0)


def open_socket(
    kind: int,
    run: RunFile,
    name: str,
    index: int | None = None,
    *,
    bind: bool = False,
    identity: bytes | None = None,
    context: zmq.SyncContext | None = None,
) -> zmq.SyncSocket:
    """A socket that is bound under a name, or connects to the one that is. To an unknown peer a ROUTER raises."""
    context = context or zmq.Context.instance()
    socket = context.socket(kind) if bind else context.socket(kind, socket_class=Connection)
    socket.linger = 500
    socket.set_hwm(HIGH_WATER_MARK)
    # A larger one closes the connection before memory is taken for it.
    socket.maxmsgsize = MAX_FRAME_BYTES + _SEAL_BYTES

    if kind == zmq.ROUTER:
        socket.router_mandatory = True
        socket.router_handover = True  # a restarted peer takes over its identity
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    if run.config.network.transport == "tcp":
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    _secure(socket, run, server=bind)

    name = socket_name(name, index)
    if isinstance(socket, Connection):
        socket.count_handshakes()
        socket.reach(run, name)
    else:
        socket.bind(run.place_of(name))
        if run.config.network.transport == "tcp":  # over ipc everybody knows where
            run.addresses.bound(name, socket.get_string(zmq.LAST_ENDPOINT))
    return socket


def close_at_once(socket: zmq.SyncSocket) -> None:
    """Close, and return when nothing of it is left: no message still to be sent, no connection still to be made.

    `close` alone only asks ZeroMQ's own thread to, which may first connect once more and send what waits.
    """
    context = socket.context
    address = f"inproc://closed-{next(_UNIQUE)}"
    socket.monitor(address, zmq.EVENT_MONITOR_STOPPED)
    closed = context.socket(zmq.PAIR)
    closed.connect(address)

    zmq.Socket.close(socket, linger=0)
    if not closed.poll(int(1000 * _CLOSE_S)):
        raise TimeoutError(f"a socket was not closed within {_CLOSE_S:g} s")
    closed.close(linger=0)
    if isinstance(socket, Connection):
        socket.news.close(linger=0)


def made_again(socket: zmq.SyncSocket) -> bool:
    """Whether a connecting socket's connection broke and was made again since the last call."""
    return isinstance(socket, Connection) and socket.made_again()


def send(socket: zmq.SyncSocket, message: Message) -> None:
    """Send to the one peer. Never blocks: senders count what is under way, so a full queue is an error (zmq.Again)."""
    send_frames(socket, encode(message))


def send_all(socket: zmq.SyncSocket, messages: list[Message], peer: bytes = b"") -> None:
    """Send several as one, which arrive in this order; `peer` as with `send_to`, where the socket is a ROUTER."""
    for first in range(0, len(messages), _TOGETHER):
        frames = encode_all(messages[first : first + _TOGETHER])
        if peer:
            send_frames_to(socket, peer, frames)
        else:
            send_frames(socket, frames)


def send_to(socket: zmq.SyncSocket, peer: bytes, message: Message) -> None:
    """Send over a ROUTER. Raises PeerGone if the peer is not connected."""
    send_frames_to(socket, peer, encode(message))


def send_frames_to(socket: zmq.SyncSocket, peer: bytes, frames: Frames) -> None:
    """Send what is one message over a ROUTER. Raises PeerGone if the peer is not connected."""
    try:
        send_frames(socket, [peer, *frames])
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            raise PeerGone(peer.decode(errors="replace")) from None
        raise


def follow(socket: zmq.SyncSocket) -> None:
    """Connect a socket to where its peer is by now."""
    if isinstance(socket, Connection):
        socket.follow()


def send_frames(socket: zmq.SyncSocket, frames: Frames) -> None:
    """What is one message. Never blocks, as `send`."""
    if isinstance(socket, Connection) and socket.holds(frames):
        return
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        socket.send(frame, _MORE if index < last else _DONTWAIT, copy=len(frame) < _COPIED_BYTES)


def receive_frames(socket: zmq.SyncSocket) -> list[bytes | memoryview]:
    """The frames of one message. `recv_multipart` does the same, but asks the socket after every frame whether more
    follow: three times the cost."""
    frames: list[bytes | memoryview] = []
    while True:
        frame = socket.recv(_DONTWAIT, copy=False)
        frames.append(frame.bytes if len(frame) < _COPIED_BYTES else frame.buffer)
        if not frame.more:
            return frames


def identity(role: str, index: int, incarnation: int = 0) -> bytes:
    """The plain name of a process, e.g. `generator.0.2` (`rl.wire.names`)."""
    return f"{role}.{index}.{incarnation}".encode()
