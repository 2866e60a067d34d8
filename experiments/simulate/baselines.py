"""What the synchronous systems do that the paper compares with: barriers, and whole prompts on one generator.

Each is the production core with one decision withheld, never a scheduler of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from rollout.broker import BrokerCore
from rollout.proxy.core import ProxyCore
from rollout.proxy.state import Generator, Request

K = TypeVar("K", bound=Hashable)
STEP, GENERATE = 0, 1  # what an episode waits to do; environments step before anybody generates again


class RoundsBroker(BrokerCore):
    """Per-batch barrier: groups are admitted, and a batch is assembled, only when no episode runs.

    Groups that filtering has dropped are replaced in the next round.
    """

    def _admit(self, now: float) -> None:
        if not self.servers.outstanding:
            super()._admit(now)

    def _assemble(self, now: float) -> bool:
        return not self.servers.outstanding and super()._assemble(now)


class PinnedProxy(ProxyCore):
    """Whole-prompt requests: every response of a prompt goes to the generator that got its first one.

    There they wait in the engine, whatever is free elsewhere.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._pinned: dict[int, Generator] = {}

    def _choose(self, request: Request) -> Generator | None:
        prompt = request.prompt_hash
        pinned = self._pinned.get(prompt) if prompt is not None else None
        if pinned is not None and pinned.alive:
            return pinned
        chosen = super()._choose(request)
        if chosen is not None and prompt is not None:
            self._pinned[prompt] = chosen
        return chosen


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
