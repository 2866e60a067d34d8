"""Right or wrong, for a response in full: extraction, the fast path, and a pool of processes for symbolic answers.

An answer that hangs its worker, or kills a fresh one too, is wrong (`unverifiable`): failing the ticket instead would
let a model escape its own bad answers by trying again. Workers start when the first answer needs one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from envs.math.answers import Symbolic, judge, last_box
from envs.workers.pool import Pool, RequestLost, WorkerKind, WorkerNotStarted

_CACHE_SIZE = 8192


@dataclass(frozen=True)
class Verdict:
    correct: bool
    boxed: bool  # there was a complete last box
    unverifiable: bool = False  # it hung or crashed the verifier


class Verifier:
    def __init__(self, workers: int = 1, deadline_s: float = 5.0) -> None:
        kind = WorkerKind("a maths verifier", "envs.math.worker", bool, deadline_s, keeps_state=False)
        self.pool: Pool[Symbolic, bool] = Pool(kind, workers)
        self.symbolic = 0  # answers that needed a worker
        # One answer a worker: what is cancelled while it waits costs none, and none waits behind one that hangs.
        self._free = asyncio.Semaphore(workers)
        self._cache: OrderedDict[Symbolic, bool | None] = OrderedDict()

    async def verify(self, gold: str, response: str) -> Verdict:
        """Whether the last box of `response` holds `gold`. Raises WorkerNotStarted."""
        answer = last_box(response)
        if answer is None:
            return Verdict(False, boxed=False)
        question = judge(gold, answer)
        if isinstance(question, bool):
            return Verdict(question, boxed=True)

        if question not in self._cache:
            self._cache[question] = await self._ask(question)
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        correct = self._cache[question]
        return Verdict(bool(correct), boxed=True, unverifiable=correct is None)

    async def stop(self) -> None:
        """Kill and reap every worker."""
        await self.pool.stop()

    async def _ask(self, question: Symbolic) -> bool | None:
        """None: unverifiable."""
        self.symbolic += 1
        self.pool.begin()
        async with self._free:  # bounded by the step deadline of the episode that waits
            session = self.pool.open()
            try:
                return await session.ask(question)
            except WorkerNotStarted:
                raise
            except RequestLost:
                return None
            finally:
                session.end()
