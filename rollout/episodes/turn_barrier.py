"""The per-turn barrier of synchronous systems (hook `turn_barrier`): a baseline, in production and the simulator.

All episodes generate, then all environments step, then all generate. A pure state machine: no clock, no sockets.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rollout.episodes.hooks import Call, EpisodeHook, Post


class TurnBarrier(EpisodeHook):
    """Per-turn barrier over the episodes that run; an environment server has one for its own.

        barrier.join(1); barrier.join(2)
        barrier.arrive(1, GENERATE, go_on)  # waits
        barrier.leave(2)                    # the last one that was awaited: go_on is posted

    Whoever joins in between waits for the next round of generations, and is waited for until it has arrived there.
    `post` delivers after what is under way now; a `go_on` may therefore come after its episode has left. A round that
    follows a join goes through `settle` instead, which gives others that are to begin with it, and whose tickets are on
    their way, time to join.
    """

    def __init__(self, options: Any, post: Post, settle: Post) -> None:
        super().__init__(options, post, settle)
        self._awaited: set[int] = set()
        self._waiting: tuple[dict[int, Call], ...] = ({}, {})  # by phase; environments step before anybody generates
        self._joins = 0
        self._settled = 0  # joins by the last round

    def join(self, ticket_id: int) -> None:
        self._awaited.add(ticket_id)
        self._joins += 1

    def leave(self, ticket_id: int) -> None:
        """An episode has ended, however it did; harmless if it has left before."""
        self._awaited.discard(ticket_id)
        for waiting in self._waiting:
            waiting.pop(ticket_id, None)
        self._look()

    def arrive(self, ticket_id: int, phase: int, go_on: Call) -> None:
        self._awaited.discard(ticket_id)
        self._waiting[phase][ticket_id] = go_on
        self._look()

    def _look(self) -> None:
        if not self._awaited:
            post = self.post if self._joins == self._settled else self.settle
            post(partial(self._release, self._joins))

    def _release(self, joins: int) -> None:
        if self._awaited or joins != self._joins:
            return  # somebody has joined meanwhile, whose arrival or end looks again
        self._settled = joins
        for waiting in self._waiting:
            if waiting:
                self._awaited = set(waiting)
                for go_on in waiting.values():
                    self.post(go_on)
                waiting.clear()
                return
