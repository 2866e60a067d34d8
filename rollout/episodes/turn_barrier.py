"""The per-turn barrier of synchronous systems (`rollout.turn_barrier`): a baseline, in production and in the simulator.

All episodes generate, then all environments step, then all generate. A pure state machine: no clock, no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

Post = Callable[[Callable[[], None]], object]
K = TypeVar("K", bound=Hashable)
# What an episode waits to do. Environments step before anybody generates again.
STEP = 0
GENERATE = 1


class TurnBarrier(Generic[K]):
    """Per-turn barrier over the episodes that run; an environment server has one for its own.

        barrier.join("a"); barrier.join("b")
        barrier.arrive("a", GENERATE, go_on)  # waits
        barrier.leave("b")                    # the last one that was awaited: go_on is posted

    Whoever joins in between waits for the next round of generations, and is waited for until it has arrived there.
    `post` delivers after what is under way now; a `go_on` may therefore come after its member has left. A round that
    follows a join goes through `settle` instead (default: `post`), which gives others that are to begin with it, and
    whose tickets are on their way, time to join.
    """

    def __init__(self, post: Post, settle: Post | None = None) -> None:
        self._post = post
        self._settle = settle or post
        self._awaited: set[K] = set()
        self._waiting: tuple[dict[K, Callable[[], None]], ...] = ({}, {})  # by phase
        self._joins = 0
        self._settled = 0  # joins by the last round

    def join(self, member: K) -> None:
        self._awaited.add(member)
        self._joins += 1

    def leave(self, member: K) -> None:
        """The member has ended, however it did; harmless if it has left before."""
        self._awaited.discard(member)
        for waiting in self._waiting:
            waiting.pop(member, None)
        self._look()

    def arrive(self, member: K, phase: int, go_on: Callable[[], None]) -> None:
        self._awaited.discard(member)
        self._waiting[phase][member] = go_on
        self._look()

    def _look(self) -> None:
        if not self._awaited:
            post = self._post if self._joins == self._settled else self._settle
            post(partial(self._release, self._joins))

    def _release(self, joins: int) -> None:
        if self._awaited or joins != self._joins:
            return  # somebody has joined meanwhile, whose arrival or end looks again
        self._settled = joins
        for waiting in self._waiting:
            if waiting:
                self._awaited = set(waiting)
                for go_on in waiting.values():
                    self._post(go_on)
                waiting.clear()
                return
