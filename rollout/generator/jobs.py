"""Requests of a generator that have not been answered: what holds them, and what is told of them while they run."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from rl.wire.columns import BUILT_IN, carried
from rl.wire.messages import Generate, Grown, Version
from rollout.generator.engines.base import Sampled

DELIVERED_EVERY = 128  # tokens of one response: at most so many, and those of one heartbeat, are sampled again
STREAM_S = 0.05  # between two messages to clients that read along
STREAM_EACH_S = 0.001  # likewise, for each request that they tell of: many readers get longer pieces, not more work

K = TypeVar("K")


class Gate(Generic[K]):
    """The gate (F2): a generator holds a request until it has loaded the version that the request asks for.

    Keys in the order of (version asked for, arrival). What was answered meanwhile is the caller's to skip.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Version, int, K]] = []
        self._arrivals = 0

    def admit(self, asked: Version, key: K, loaded: Version) -> bool:
        """Whether the request may run now; else it is held."""
        if asked <= loaded:
            return True
        heapq.heappush(self._held, (asked, self._arrivals, key))
        self._arrivals += 1
        return False

    def release(self, loaded: Version) -> list[K]:
        """What `loaded` lets through, in order."""
        due: list[K] = []
        while self._held and self._held[0][0] <= loaded:
            due.append(heapq.heappop(self._held)[2])
        return due


@dataclass(slots=True)
class Job:
    """A request that has not been answered."""

    request: Generate
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None  # None: held
    tokens: int = 0  # sampled so far, discarded ones included
    sampled: Sampled = field(default_factory=Sampled)
    delivered: int = 0  # tokens of `sampled` that the proxy has
    first_version: int | None = None
    aborted: bool = False

    def grown(self, at_least: int) -> tuple[int, dict[str, np.ndarray]] | None:
        """The new tokens, if there are as many: the first one's place, and their columns.

        Context columns stay here, since who goes on with the response reads its tokens. Without its other columns a
        token is told of only where a client reads along.
        """
        sampled = self.sampled
        start = self.delivered
        new = slice(start, len(sampled.token_ids))
        if new.stop - start < at_least:
            return None

        columns = [each for each in carried(["token"], "generator") if each.covers == "sampled"]
        further = [column.name for column in columns if column.name not in BUILT_IN]
        told = [name for name in further if len(sampled.columns.get(name, ())) >= new.stop]
        if len(told) < len(further) and not self.request.stream:
            return None

        self.delivered = new.stop
        part = Sampled(sampled.token_ids[new], sampled.logp[new], sampled.policy_version[new])
        part.columns = {name: sampled.columns[name][new] for name in told}
        return start, part.arrays()


class Streams:
    """What requests with `stream` have grown by, all of them in one message; the first tokens are told at once.

    The proxy keeps what it passes on, as it keeps what long responses have grown by: what a client has read is not
    sampled again when this generator dies.
    """

    def __init__(self, send: Callable[[Grown], None]) -> None:
        self._send = send
        self._grown: dict[int, Job] = {}  # by request id: to be told of
        self._timer: asyncio.TimerHandle | None = None
        self._next = 0.0  # time of the loop from which on a message may leave

    def grew(self, job: Job) -> None:
        """A job has new tokens and goes on."""
        self._grown[job.request.request_id] = job
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._next, loop.time()), self._tell, loop)

    def forget(self, request_id: int) -> None:
        """Forget a request that is answered."""
        self._grown.pop(request_id, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        grown = {key: new for key, job in self._grown.items() if (new := job.grown(1))}
        self._grown.clear()
        self._timer = None
        if grown:
            self._next = loop.time() + max(STREAM_S, STREAM_EACH_S * len(grown))
            self._send(Grown(grown))
