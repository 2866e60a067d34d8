"""The per-turn barrier of the synchronous systems that the paper compares with.

Their other two habits are settings of the production cores: `Settings.batch_barrier`, `ProxyCore(pin_prompts=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
STEP, GENERATE = 0, 1  # what an episode waits to do; environments step before anybody generates again


class TurnBarrier(Generic[K]):
    """Per-turn barrier over the episodes that run: all generate, then all environments step, then all generate.

        barrier.join("a"); barrier.join("b")
        barrier.arrive("a", GENERATE, go_on)  # waits
        barrier.leave("b")                    # the last one that was awaited: go_on is posted

    Whoever joins in between waits for the next round of generations. `post` delivers after what is under way now.
    """

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post
        self._awaited: set[K] = set()
        self._waiting: tuple[dict[K, Callable[[], None]], ...] = ({}, {})  # by phase

    def join(self, member: K) -> None:
        self._awaited.add(member)

    def leave(self, member: K) -> None:
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
            self._post(self._release)

    def _release(self) -> None:
        if self._awaited:
            return  # somebody has joined meanwhile
        for waiting in self._waiting:
            if waiting:
                self._awaited = set(waiting)
                for go_on in waiting.values():
                    self._post(go_on)
                waiting.clear()
                return
