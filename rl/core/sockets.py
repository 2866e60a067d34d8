"""ZeroMQ sockets as every process opens them: limits, linger, heartbeats, CURVE, and typed messages.

Payload goes over PUSH/PULL (one pair per receiver: a PUSH to many hands each message to one of them);
what needs an address or an answer over ROUTER/DEALER. PULL of a dead process loses what was in flight,
so whatever must not be lost is acknowledged and sent again by its sender.
"""

from __future__ import annotations

import os
from pathlib import Path

import zmq

from rl.core.messages import Frames, Message, decode, encode
from rl.core.run import RunFile

HIGH_WATER_MARK = 100_000  # messages; flow control is by credit, not by blocking sockets
# Plain numbers: enums are slow to combine.
_DONTWAIT = int(zmq.DONTWAIT)
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
_COPIED_BYTES = 1 << 14  # smaller frames share a receive buffer: a view would keep it alive, and may be unaligned
_SHARED_SERVER_KEY = "curve.server"
_SHARED_CLIENT_KEY = "curve.client"


class PeerGone(ConnectionError):
    """A ROUTER was asked to send to a peer that is not connected."""


def make_curve_keys(folder: Path) -> None:
    """Per-run CURVE key pairs, readable by the owner only. The server's public key is the shared secret."""
    for name in (_SHARED_SERVER_KEY, _SHARED_CLIENT_KEY):
        public, secret = zmq.curve_keypair()
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(public + b"\n" + secret)


def _secure(socket: zmq.SyncSocket, run: RunFile, *, server: bool) -> None:
    if run.config.network.transport != "tcp" or not run.config.network.curve:
        return
    server_public, server_secret = (run.folder / _SHARED_SERVER_KEY).read_bytes().split(b"\n")
    client_public, client_secret = (run.folder / _SHARED_CLIENT_KEY).read_bytes().split(b"\n")
    if server:
        socket.curve_server = True
        socket.curve_publickey = server_public
        socket.curve_secretkey = server_secret
    else:
        socket.curve_serverkey = server_public
        socket.curve_publickey = client_public
        socket.curve_secretkey = client_secret


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
    """A socket bound or connected to `run.endpoint(name, index)`. ROUTERs are mandatory: unknown peers raise."""
    socket = (context or zmq.Context.instance()).socket(kind)
    socket.linger = 500
    socket.set_hwm(HIGH_WATER_MARK)

    if kind == zmq.ROUTER:
        socket.router_mandatory = True
        socket.router_handover = True  # a restarted peer takes over its identity
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    if run.config.network.transport == "tcp":
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    _secure(socket, run, server=bind)

    endpoint = run.endpoint(name, index)
    if bind:
        socket.bind(endpoint)
    else:
        socket.connect(endpoint)
    return socket


def send(socket: zmq.SyncSocket, message: Message) -> None:
    """Send to the one peer. Never blocks: flow control is by credit, so a full queue is an error (zmq.Again)."""
    _send_frames(socket, encode(message))


def send_to(socket: zmq.SyncSocket, peer: bytes, message: Message) -> None:
    """Send over a ROUTER. Raises PeerGone if the peer is not connected."""
    frames = [peer, *encode(message)]
    try:
        _send_frames(socket, frames)
    except zmq.ZMQError as error:
        if error.errno == zmq.EHOSTUNREACH:
            raise PeerGone(peer.decode(errors="replace")) from None
        raise


def receive(socket: zmq.SyncSocket) -> Message:
    """The next message. Never blocks: raises zmq.Again if there is none."""
    return decode(receive_frames(socket))


def receive_from(socket: zmq.SyncSocket) -> tuple[bytes, Message]:
    """The next message of a ROUTER and its sender's identity."""
    peer, *frames = receive_frames(socket)
    return bytes(peer), decode(frames)


def _send_frames(socket: zmq.SyncSocket, frames: Frames) -> None:
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        socket.send(frame, _MORE if index < last else _DONTWAIT, copy=len(frame) < _COPIED_BYTES)


def receive_frames(socket: zmq.SyncSocket) -> list[bytes | memoryview]:
    """As `recv_multipart`, which asks the socket after every frame whether more follow: three times the cost."""
    frames: list[bytes | memoryview] = []
    while True:
        frame = socket.recv(_DONTWAIT, copy=False)
        frames.append(frame.bytes if len(frame) < _COPIED_BYTES else frame.buffer)
        if not frame.more:
            return frames


def identity(role: str, index: int, incarnation: int = 0) -> bytes:
    """Socket identity of a process, e.g. `generator.0.2`."""
    return f"{role}.{index}.{incarnation}".encode()
