"""An environment that only costs time and fails on demand: for tests, timing and fault injection.

It needs no tokenizer: without a model, messages are ids separated by spaces. Prompts and observations are functions of
(seed, split, task, turn). Latencies, hangs and failures also depend on how often this server has begun the task, so
that the episodes of a group, and attempts after a failure, fare differently. Rewards are a function of the generated
text alone, and differ between episodes, so that losses computed from them are not trivially zero. An episode succeeds
if its last turn earned half or more of what it could.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections import Counter
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from rollout.episodes.environment import ChatMessage, Step


class SyntheticOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    tasks: int = Field(1000, ge=1)
    """Training tasks."""
    eval_tasks: int = Field(64, ge=0)
    turns: int = Field(1, ge=1)
    """Turns after which the environment says done."""
    mean_s: float = Field(0.0, ge=0)
    """Mean seconds of one step (Gaussian, clipped at 0)."""
    sigma_s: float = Field(0.0, ge=0)
    hang_probability: float = Field(0.0, ge=0, le=1)
    """The probability of a step that never answers."""
    fail_probability: float = Field(0.0, ge=0, le=1)
    """The probability of a step that raises."""
    prompt_tokens: int = Field(16, ge=1)
    """Ids of the first message."""
    observation_tokens: int = Field(4, ge=1)
    """Ids of each later message."""
    vocab_size: int = Field(128, ge=2)
    """Ids are drawn from [1, vocab_size)."""


@dataclass(frozen=True)
class SyntheticTask:
    split: str
    index: int


class SyntheticFault(RuntimeError):
    """The failure that `fail_probability` asks for."""


class SyntheticFamily:
    Options: type[BaseModel] = SyntheticOptions

    def __init__(self, options: SyntheticOptions, seed: int) -> None:
        self.options = options
        self.seed = seed
        self._visits: Counter[SyntheticTask] = Counter()

    def task_count(self, split: str) -> int:
        return self.options.tasks if split == "train" else self.options.eval_tasks

    def task(self, split: str, index: int) -> SyntheticTask:
        return SyntheticTask(split, index)

    def data(self) -> list[int]:
        options = self.options
        return [self.seed, options.tasks, options.prompt_tokens, options.vocab_size]

    async def start(self) -> None:
        pass

    def make(self) -> SyntheticEnvironment:
        return SyntheticEnvironment(self)

    async def stop(self) -> None:
        pass

    def visit(self, task: SyntheticTask) -> int:
        """How often this task was begun before."""
        self._visits[task] += 1
        return self._visits[task] - 1

    def latency_s(self, task: SyntheticTask, turn: int, visit: int) -> float:
        """Seconds that this step takes: what a prediction needs to make the same draws."""
        return self.draw_latency_s(self.random(task, turn, "chance", visit))

    def draw_latency_s(self, chance: random.Random) -> float:
        return max(0.0, chance.gauss(self.options.mean_s, self.options.sigma_s))

    def random(self, task: SyntheticTask, turn: int, purpose: str, visit: int = 0) -> random.Random:
        return random.Random(f"{self.seed} {task.split} {task.index} {turn} {purpose} {visit}")


class SyntheticEnvironment:
    def __init__(self, family: SyntheticFamily) -> None:
        self._family = family
        self._options = family.options
        self._turn = 0

    async def reset(self, task: SyntheticTask) -> list[ChatMessage]:
        self._task = task
        self._visit = self._family.visit(task)
        return [self._message(self._options.prompt_tokens)]

    async def step(self, action: str, truncated: bool = False) -> Step:
        options = self._options
        chance = self._family.random(self._task, self._turn, "chance", self._visit)
        latency_s = self._family.draw_latency_s(chance)
        if latency_s:
            await asyncio.sleep(latency_s)
        if chance.random() < options.hang_probability:
            await asyncio.Event().wait()

        if chance.random() < options.fail_probability:
            raise SyntheticFault(f"task {self._task.index}, turn {self._turn}")
        self._turn += 1
        done = self._turn >= options.turns
        messages = [] if done else [self._message(options.observation_tokens)]
        share = text_reward(action)
        notes = {"expected": "at least 0.5 in the last turn", "read": f"{share:.3f}"}
        info = {"turns": float(self._turn)}
        return Step(messages, share / options.turns, done, done and share >= 0.5, info, notes=notes)

    async def close(self) -> None:
        pass

    def _message(self, tokens: int) -> ChatMessage:
        ids = self._family.random(self._task, self._turn, "message")
        return ChatMessage("user", " ".join(str(ids.randrange(1, self._options.vocab_size)) for _ in range(tokens)))


def text_reward(text: str) -> float:
    """Share of even words, in [0, 1]: ids by their value, other words by their checksum; 0 for an empty text."""
    words = text.split()
    even = sum(1 for word in words if (int(word[-1]) if word.isdecimal() else zlib.crc32(word.encode())) % 2 == 0)
    return even / len(words) if words else 0.0
