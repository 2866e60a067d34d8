"""Right or wrong, for a response in full: extraction, the fast path, and a pool of processes for symbolic answers.

An answer that uses up its CPU time, kills a fresh worker too, or over which the algebra system fails (`algebra`) cannot
be judged: its sample is not trained. Failing the ticket instead would let a model escape its own bad answers by trying
again. A worker that does not answer and uses no CPU time either is the machine's fault, and fails the ticket. Neither
is remembered. Workers start when the first answer needs one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from envs.answers import answer_of
from envs.math.answers import Symbolic, cut_off, judge, last_box
from envs.workers.pool import Pool
from envs.workers.process import WorkerKind

_CACHE_SIZE = 8192


@dataclass(frozen=True)
class Verdict:
    correct: bool
    boxed: bool  # there was a complete last box
    cut_off: bool = False  # it ends within its last box


class Verifier:
    """`cpu_s`: of one comparison; `hang_s`: by the clock, for a worker that gets no CPU time or waits for ever."""

    def __init__(self, workers: int = 1, cpu_s: float = 2.0, hang_s: float = 120.0) -> None:
        kind = WorkerKind("a maths verifier", "envs.math.worker", bool, hang_s, [str(cpu_s)], keeps_state=False)
        self.pool: Pool[Symbolic, bool] = Pool(kind, workers)
        self.symbolic = 0  # answers that needed a worker
        # One answer a worker: what is cancelled while it waits costs none, and none waits behind one that hangs.
        self._free = asyncio.Semaphore(workers)
        self._cache: OrderedDict[Symbolic, bool] = OrderedDict()

    async def verify(self, gold: str, response: str, asked: str = "") -> Verdict:
        """Whether the last box of the answer in `response` holds `gold`. Raises RequestLost.

        `asked`: what the data say of the gold's type, as in `answers.typed`.
        """
        said = answer_of(response)
        answer = last_box(said)
        if answer is None:
            return Verdict(False, boxed=False, cut_off=cut_off(said))
        question = judge(gold, answer, asked)
        if isinstance(question, bool):
            return Verdict(question, boxed=True)

        correct = self._cache.get(question)
        if correct is None:
            correct = await self._ask(question)
        self._cache[question] = correct
        if len(self._cache) > _CACHE_SIZE:
            self._cache.popitem(last=False)
        return Verdict(correct, boxed=True)

    async def stop(self) -> None:
        """Kill and reap every worker."""
        await self.pool.stop()

    async def _ask(self, question: Symbolic) -> bool:
        self.symbolic += 1
        self.pool.begin()
        async with self._free:  # bounded by the step deadline of the episode that waits
            session = self.pool.open()
            try:
                return await session.ask(question)
            finally:
                session.end()
