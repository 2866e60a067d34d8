"""Bytes in bulk between machines: plain tcp, where every frame carries a MAC with a key of its own connection.

CURVE passes about 1 GB/s a core, which is less than a fast link. So a rank gives each reader a new key over its own
socket, which is encrypted, and where the bytes are (`Parcel`). The bytes themselves go unencrypted. A MAC (AES-GMAC)
covers every request and every answer with its number. A rank answers a number once, so that what is sent again gets
nothing, and a reader drops what it has not asked for. What was lost or damaged is asked for under another number.

    reader                                  rank r (a thread)
    number, source, offset, length, MAC ──▶            a few at a time
                                        ◀── number, bytes, MAC
"""

from __future__ import annotations

import contextlib
import secrets
import struct
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import zmq
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from msgspec import Struct

from rl.wire.run import RunFile, numeric

CHUNK_BYTES = 4 << 20
CREDIT = 4  # chunks asked for and not received
_TICK_MS = 50
_ASKED, _SENT = range(2)  # whose number it is: no nonce is used twice
_REQUEST = struct.Struct("<QIQQ")  # number, source, offset, length
_NUMBER = struct.Struct("<Q")

Wanted = tuple[int, int, int]
"""Source, offset and length of a chunk."""


class Parcel(Struct, frozen=True):
    """What a reader needs to fetch: it is told over an encrypted socket."""

    endpoint: str
    identity: bytes  # the name of the reader's socket, which nobody else knows
    key: bytes


def mac(key: AESGCM, side: int, number: int, data: bytes | memoryview) -> bytes:
    """Of these bytes, as this number's."""
    return key.encrypt(struct.pack("<IQ", side, number), b"", data)


def is_genuine(key: AESGCM, side: int, number: int, data: bytes | memoryview, tag: bytes) -> bool:
    try:
        key.decrypt(struct.pack("<IQ", side, number), tag, data)
    except (InvalidTag, ValueError):
        return False
    return True


@dataclass
class _Grant:
    """What one reader may fetch now."""

    key: AESGCM
    identity: bytes
    sources: Sequence[bytes | memoryview]
    answered: int = -1  # the last number


class BulkServer:
    """Sends what was granted, in a thread; `failed` holds what ended it."""

    def __init__(self, run: RunFile, rank: int) -> None:
        self.failed: str | None = None
        self.refused = 0
        """Requests that were not answered: forged, sent again, or of a reader whose grant is over."""
        self._grants: dict[str, _Grant] = {}  # by reader, as `name.incarnation`
        self._stopping = False

        context: zmq.SyncContext = zmq.Context.instance()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.maxmsgsize = 4096  # requests are short
        self._socket.router_mandatory = True
        self._socket.router_handover = True  # a connection that is made again
        self._socket.bind(f"tcp://{numeric(run.host)}:*")

        self._endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, name=f"weights.bulk.{rank}", daemon=True)
        self._thread.start()

    def grant(self, reader: str, sources: Sequence[bytes | memoryview]) -> Parcel:
        """The reader may fetch these from now on, and nothing that it could fetch before."""
        key = AESGCM.generate_key(128)
        identity = secrets.token_bytes(16)
        self._grants[reader] = _Grant(AESGCM(key), b"\1" + identity, sources)  # ZeroMQ's own begin with a zero
        return Parcel(self._endpoint, b"\1" + identity, key)

    def revoke(self, name: str, incarnation: int) -> None:
        """The readers `name-...` of this or an earlier incarnation are dead."""
        for reader in list(self._grants):
            whose, _, number = reader.rpartition(".")
            if whose.startswith(f"{name}-") and int(number) <= incarnation:
                del self._grants[reader]

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(5)

    def _serve(self) -> None:
        try:
            while not self._stopping:
                if self._socket.poll(_TICK_MS):
                    self._answer(self._socket.recv_multipart())
        except Exception as error:  # raised again in the learner by its next call
            traceback.print_exc()
            self.failed = f"the server of weights in bulk ended: {type(error).__name__}: {error}"
        finally:
            self._socket.close()

    def _answer(self, frames: list[bytes]) -> None:
        grant = next((each for each in list(self._grants.values()) if each.identity == frames[0]), None)
        if grant is None or len(frames) != 3 or len(frames[1]) != _REQUEST.size:
            return self._refuse()

        number, index, offset, length = _REQUEST.unpack(frames[1])
        if number <= grant.answered or not is_genuine(grant.key, _ASKED, number, frames[1], frames[2]):
            return self._refuse()
        source = memoryview(grant.sources[index] if index < len(grant.sources) else b"")
        if not offset <= offset + length <= min(len(source), offset + CHUNK_BYTES):
            return self._refuse()

        grant.answered = number
        data = source[offset : offset + length]
        answer: list[bytes | memoryview] = [frames[0], _NUMBER.pack(number), data, mac(grant.key, _SENT, number, data)]
        with contextlib.suppress(zmq.Again, zmq.ZMQError):  # it has gone; it asks anew when it is back
            self._socket.send_multipart(answer, zmq.DONTWAIT, copy=False)

    def _refuse(self) -> None:
        self.refused += 1
        if self.refused.bit_count() == 1:  # the first, the second, the fourth ...
            print(f"weights: {self.refused} requests in bulk were refused so far", file=sys.stderr, flush=True)


class BulkReader:
    """Fetches what one rank has granted, in order; `into` of each source are the bytes it is written to."""

    def __init__(self, parcel: Parcel, wanted: Iterator[Wanted], into: Sequence[memoryview]) -> None:
        self._key = AESGCM(parcel.key)
        self._wanted = wanted
        self._into = into
        self._coming: dict[int, Wanted] = {}
        self._number = 0

        context: zmq.SyncContext = zmq.Context.instance()
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.maxmsgsize = 2 * CHUNK_BYTES
        self.socket.setsockopt(zmq.IDENTITY, parcel.identity)
        self.socket.connect(parcel.endpoint)
        for _ in range(CREDIT):
            self._ask_next()

    @property
    def fetched(self) -> bool:
        return not self._coming

    def receive(self) -> int:
        """Take one message, which is there; returns how many bytes it brought. What is damaged is asked for again."""
        frames = self.socket.recv_multipart(copy=False)
        number = int.from_bytes(frames[0].bytes, "little")
        wanted = self._coming.get(number)
        if wanted is None or len(frames) != 3:
            return 0  # sent twice, or never asked for
        del self._coming[number]

        source, offset, length = wanted
        data = frames[1].buffer
        if len(data) != length or not is_genuine(self._key, _SENT, number, data, frames[2].bytes):
            self._ask(wanted)
            return 0
        self._into[source][offset : offset + length] = data
        self._ask_next()
        return length

    def ask_again(self) -> None:
        """What has not come, which may be lost."""
        coming = list(self._coming.values())
        self._coming.clear()
        for wanted in coming:
            self._ask(wanted)

    def close(self) -> None:
        self.socket.close()

    def _ask_next(self) -> None:
        wanted = next(self._wanted, None)
        if wanted is not None:
            self._ask(wanted)

    def _ask(self, wanted: Wanted) -> None:
        request = _REQUEST.pack(self._number, *wanted)
        self._coming[self._number] = wanted
        self.socket.send_multipart([request, mac(self._key, _ASKED, self._number, request)])
        self._number += 1


def chunks(source: int, nbytes: int) -> Iterator[Wanted]:
    """All of a source."""
    for at in range(0, nbytes, CHUNK_BYTES):
        yield source, at, min(CHUNK_BYTES, nbytes - at)
