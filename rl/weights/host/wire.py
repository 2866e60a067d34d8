"""Questions to the server of a learner rank and its answers: the wire of transport `zmq` (`rl.weights.host.frames`).

Every question carries a number, which its answer repeats: answers to a question that was given up are dropped.
"""

from __future__ import annotations

import time
from typing import TypeVar

import numpy as np
import zmq
from msgspec import Struct

from rl.weights.channel import WeightsError
from rl.weights.host.bulk import Parcel
from rl.weights.host.layout import Manifest, Segment
from rl.wire.codec import Codec, ProtocolError
from rl.wire.messages import Version
from rl.wire.process import WaitExpired
from rl.wire.receiving import Malformed
from rl.wire.run import RunFile
from rl.wire.sockets import follow, open_socket, send_frames

_LOOK_MS = 200


class Describe(Struct, frozen=True, tag="describe"):
    """Which tensors are exported? The answer is Layout."""


class Layout(Struct, frozen=True, tag="layout"):
    """Answer to Describe."""

    manifest: Manifest


class FindSlot(Struct, frozen=True, tag="find_slot"):
    """A writing rank asks where `version` is to be written. The answer is Slot."""

    version: Version


class Commit(Struct, frozen=True, tag="commit"):
    """A writing rank has written its segments into the slot. The answer is Slot."""

    rank: int
    slot: int
    segments: list[Segment]


class Slot(Struct, frozen=True, tag="slot"):
    """Answer to FindSlot and Commit."""

    slot: int


class AskLease(Struct, frozen=True, tag="ask_lease"):
    """A reader wants the newest version. The answer is Granted."""

    reader: str
    incarnation: int
    at_least: Version


class Granted(Struct, frozen=True, tag="granted"):
    """Answer to AskLease."""

    version: Version
    slot: int
    segments: list[list[Segment]]  # of each rank


class Fetch(Struct, frozen=True, tag="fetch"):
    """A reader wants bytes of a leased slot that this rank wrote. The answer is Chunk."""

    slot: int
    offset: int
    length: int


class Chunk(Struct, frozen=True, tag="chunk"):
    """Answer to Fetch."""

    offset: int
    data: np.ndarray  # (length,) uint8, sent without a copy


class AskParts(Struct, frozen=True, tag="ask_parts"):
    """A reader asks how it is to fetch in bulk what this rank wrote into a leased slot. The answer is Parts."""

    machine: str  # on which the reader stands
    slot: int
    has: int  # checksum of this rank's bytes as that machine has them; 0: it has none
    wants: int  # and as they are in the slot


class Parts(Struct, frozen=True, tag="parts"):
    """Answer to AskParts."""

    parcel: Parcel
    patches: list[int] | None  # bytes of each, from what the machine has to what is in the slot; None: the slot itself


class Release(Struct, frozen=True, tag="release"):
    """A reader ends its lease. The answer is Released."""

    fetched: dict[str, int] = {}  # what its machine fetched in bulk under it


class Released(Struct, frozen=True, tag="released"):
    """Answer to Release."""

    intact: bool  # the slot was not overwritten while it was leased


class NotYet(Struct, frozen=True, tag="not_yet"):
    """Answer to FindSlot, AskLease and AskParts: ask again."""

    waiting: str  # who is waited for
    leases: int = 0  # slots that readers hold at this moment


class Refused(Struct, frozen=True, tag="refused"):
    """Answer to anything that cannot be."""

    reason: str


Question = Describe | FindSlot | Commit | AskLease | AskParts | Fetch | Release
Answer = Layout | Slot | Granted | Parts | Chunk | Released | NotYet | Refused
_Expected = TypeVar("_Expected", bound=Answer)


class Numbered(Struct, frozen=True, array_like=True):
    """What crosses the socket. An answer has the number of its question."""

    number: int
    message: Question | Answer


codec: Codec[Numbered] = Codec(Numbered)


class Connection:
    """The connection to the server of one rank, from this incarnation of the process `name`."""

    def __init__(self, run: RunFile, rank: int, name: str, incarnation: int = 0) -> None:
        self.rank = rank
        self.not_yet = NotYet("it has not answered yet")  # the newest
        me = run.names.proven(f"{name}.{incarnation}".encode())
        self.socket = open_socket(zmq.DEALER, run, "blobs", rank, identity=me)
        self._name = name
        self._malformed = Malformed(name)
        self._number = 0

    def ask(self, question: Question, expected: type[_Expected], deadline_s: float) -> _Expected | None:
        """The answer; None if it is NotYet. Raises WaitExpired if there is none in time, WeightsError if refused."""
        until = time.monotonic() + deadline_s
        self.begin()
        self.post(question)
        while self._answers(until):
            answer = self.receive()
            if isinstance(answer, expected):
                return answer
            if isinstance(answer, NotYet):
                self.not_yet = answer
                return None
        what = type(question).__name__
        raise WaitExpired(f"{self._name} waits for learner rank {self.rank} to answer {what} ({deadline_s:g} s)")

    def _answers(self, until: float) -> bool:
        """Whether there is a message before this moment."""
        while True:
            follow(self.socket)  # the rank may have said only now where it listens
            left = milliseconds_to(until)
            if self.socket.poll(min(left, _LOOK_MS)) or not left:
                return bool(self.socket.poll(0))

    def begin(self) -> None:
        """What was asked until now is given up."""
        self._number += 1

    def post(self, question: Question) -> None:
        """Ask without waiting for the answer."""
        send_frames(self.socket, codec.encode(Numbered(self._number, question)))

    def receive(self) -> Question | Answer | None:
        """A message, which is there; None if it answers what was given up. Raises WeightsError if it is a refusal."""
        frames = self.socket.recv_multipart(copy=False)
        try:
            answer = codec.decode([frame.buffer for frame in frames])
        except ProtocolError as error:
            self._malformed(error)
            return None

        if answer.number != self._number:
            return None
        if isinstance(answer.message, Refused):
            raise WeightsError(answer.message.reason)
        return answer.message

    def close(self) -> None:
        self.socket.close(linger=200)


def milliseconds_to(until: float) -> int:
    """The time from now until then (monotonic seconds); 0 if that is past."""
    return max(0, int((until - time.monotonic()) * 1000))
