"""A data set of reasoning-gym behind the Environment protocol: its question, one answer, its own score.

Entry i of a data set with seed s is drawn from `Random(s + i)`, so seeds that lie close share their entries. Training
and held-out tasks therefore begin 2^30 apart.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from random import Random
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from envs.answers import tagged
from envs.audit.auditor import Change, replayed, variants
from envs.audit.changes import of_plain, value_of
from envs.reasoning_gym.requests import PuzzleReply, PuzzleRequest
from envs.workers.pool import Pool
from envs.workers.process import RequestLost, WorkerHung, WorkerKind, WorkerNotStarted
from rl.config.tree import nearest
from rollout.episodes.environment import ChatMessage, Needs, RewardFailed, Step

INSTRUCTION = "Give your final answer, and nothing else, between <answer> and </answer>."
APART = 1 << 30  # between the seeds of training and of held-out tasks


class ReasoningGymOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    dataset: str
    """A name of reasoning-gym, such as `countdown`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the data set, such as its difficulty; reasoning-gym refuses what it does not know."""
    tasks: int = Field(10_000, ge=1, lt=APART)
    """Training tasks; each is made when it is played."""
    eval_tasks: int = Field(64, ge=0, lt=APART)
    """Held-out tasks."""
    system_prompt: str = ""
    """The system prompt; none if it is empty."""
    instruction: str = INSTRUCTION
    """A text that is appended to each question on a line of its own."""
    success_score: float = Field(1.0, gt=0, le=1)
    """Score from which on a task counts as solved. The reward is the score itself: some data sets give parts of it."""
    workers: int = Field(1, ge=1)
    """Processes per server that make tasks and score answers."""
    request_deadline_s: float = Field(20.0, gt=0)
    """An answer over which the data set takes longer is wrong; its worker is replaced."""


@dataclass(frozen=True)
class Puzzle:
    dataset: str
    seed: int
    index: int


class ReasoningGymFamily:
    Options: type[BaseModel] = ReasoningGymOptions
    audit_s = 0.05

    def __init__(self, options: ReasoningGymOptions, seed: int) -> None:
        """Raises ValueError for a data set or an argument that reasoning-gym does not know."""
        _check(options)
        self.options = options
        first = Random(f"{seed} {options.dataset}").randrange(APART)
        self._seeds = {"train": first, "eval": first + APART}

        size = max(options.tasks, options.eval_tasks)
        kind = WorkerKind(
            name="a reasoning-gym worker",
            module="envs.reasoning_gym.worker",
            arguments=[options.dataset, json.dumps(options.config), str(size)],
            result=PuzzleReply,
            deadline_s=options.request_deadline_s,
            keeps_state=False,
        )
        self.pool: Pool[PuzzleRequest, PuzzleReply] = Pool(kind, options.workers)

    @classmethod
    def needs(cls, options: ReasoningGymOptions) -> Needs:
        return Needs(options.request_deadline_s, f"env.options.request_deadline_s={options.request_deadline_s:g}")

    @classmethod
    def planned(cls, options: ReasoningGymOptions) -> dict[str, int]:
        return {"train": options.tasks, "eval": options.eval_tasks}

    def task_count(self, split: str) -> int:
        return self.planned(self.options)[split]

    def task(self, split: str, index: int) -> Puzzle:
        return Puzzle(self.options.dataset, self._seeds[split], index)

    def data(self) -> list[object]:
        return [self.options.dataset, self.options.config, self._seeds["train"], self.options.tasks]

    async def start(self) -> None:
        await self.pool.start()

    def make(self) -> ReasoningGymEnvironment:
        return ReasoningGymEnvironment(self)

    async def stop(self) -> None:
        await self.pool.stop()

    async def changes(self, task: Puzzle, response: str, dice: random.Random) -> list[Change]:
        """Other numbers, where the answer is the gold number: elsewhere a puzzle may have several solutions."""
        environment = self.make()
        await environment.reset(task)
        gold = f"{environment.known}"
        answer = tagged(response, "answer")
        if answer is None or value_of(gold) is None or answer.strip() != gold.strip():
            return []
        return variants(task, "<answer>", of_plain(gold.strip()), "</answer>")

    async def judged(self, change: Change) -> bool:
        return await replayed(self, change)


class ReasoningGymEnvironment:
    def __init__(self, family: ReasoningGymFamily) -> None:
        self._options = family.options
        self._pool = family.pool

    async def reset(self, task: Puzzle) -> list[ChatMessage]:
        self._task = task
        reply = await self._ask(None)
        self.known = reply.gold
        system = self._options.system_prompt
        opening = [ChatMessage("system", system)] if system else []
        asks = f"\n{self._options.instruction}" if self._options.instruction else ""
        return [*opening, ChatMessage("user", reply.question + asks)]

    async def step(self, action: str, truncated: bool = False) -> Step:
        answer = tagged(action, "answer")
        score = 0.0
        if answer is not None:
            try:
                reply = await self._ask(answer)
            except WorkerNotStarted:
                raise
            except RequestLost as error:  # it hung or killed the worker
                raise RewardFailed(f"reasoning-gym's score_answer: {error}") from error
            if reply.error:
                raise RewardFailed(reply.error)
            score = reply.score

        success = score >= self._options.success_score
        info = {"answered": float(answer is not None)}
        notes = {"expected": self.known} if self.known else {}
        notes["read"] = "no closed <answer>" if answer is None else answer
        return Step([], score, done=True, success=success, info=info, notes=notes)

    async def gold(self) -> str | None:
        return f"<answer>{self.known}</answer>" if self.known else None

    async def close(self) -> None:
        pass

    async def _ask(self, answer: str | None) -> PuzzleReply:
        session = self._pool.open()
        try:
            return await session.ask(PuzzleRequest(self._task.seed, self._task.index, answer))
        except WorkerHung as error:
            if answer is None:
                raise RuntimeError(f"reasoning-gym did not make {self._task}: {error}") from None
            raise
        finally:
            session.end()


def _check(options: ReasoningGymOptions) -> None:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise ImportError("reasoning-gym is not installed: pip install 'fresco-rl[reasoning-gym]'") from None

    if options.dataset not in DATASETS:
        close = nearest(options.dataset, list(DATASETS))
        raise ValueError(f"env.options.dataset={options.dataset!r} is no data set of reasoning-gym{close}")
    try:
        reasoning_gym.create_dataset(options.dataset, seed=0, size=1, **options.config)
    except Exception as error:  # whatever the data set's own checks raise
        raise ValueError(f"env.options.config={options.config}: {error}") from None
