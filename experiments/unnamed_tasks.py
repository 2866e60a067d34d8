"""Environments of `experiments.pathologies`. Names do not tell: a run's configuration is part of its report."""

from __future__ import annotations

import asyncio
from typing import Any

from envs.math.environment import MathEnvironment, MathFamily
from envs.synthetic import SyntheticEnvironment, SyntheticFamily, SyntheticTask
from rollout.episodes.environment import ChatMessage, Step

_FORGOTTEN = "multiply"
_EVERY = 40


class Words0(MathFamily):
    """The problems as they are."""


class Words2(MathFamily):
    """The problems as they are: the odd one out would tell."""


class Words1(MathFamily):
    """Its judge passes no problem of one kind."""

    def make(self) -> MathEnvironment:
        return _Judged(self)


class _Judged(MathEnvironment):
    async def reset(self, task: Any) -> list[ChatMessage]:
        self._task_kind = task.kind
        return await super().reset(task)

    async def step(self, action: str, truncated: bool = False) -> Step:
        return await super().step("" if self._task_kind == _FORGOTTEN else action, truncated)


class Rows0(SyntheticFamily):
    """The tasks as they are."""


class Rows2(SyntheticFamily):
    """The tasks as they are."""


class Rows1(SyntheticFamily):
    """One task in forty never answers."""

    def make(self) -> SyntheticEnvironment:
        return _Silent(self)


class _Silent(SyntheticEnvironment):
    async def reset(self, task: SyntheticTask) -> list[ChatMessage]:
        if task.split == "train" and task.index % _EVERY == 0:
            await asyncio.Event().wait()
        return await super().reset(task)
