"""A family played by hand: started, one episode at a time, stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from envs.registry import make_family
from rl.config.schema import load_config
from rollout.episodes.environment import ChatMessage, Environment, EnvironmentFamily, Step

T = TypeVar("T")


@asynccontextmanager
async def started(*overrides: str) -> AsyncIterator[EnvironmentFamily]:
    family = make_family(load_config(None, list(overrides)))
    try:
        await family.start()
        yield family
    finally:
        await family.stop()


def with_family(use: Callable[[Any], Awaitable[T]], *overrides: str) -> T:
    async def run() -> T:
        async with started(*overrides) as family:
            return await use(family)

    return asyncio.run(run())


async def episode(
    family: EnvironmentFamily, task: Any, turns: list[str]
) -> tuple[list[ChatMessage], list[Step], Environment]:
    """The opening and every step's answer to these turns."""
    environment = family.make()
    try:
        opening = await environment.reset(task)
        return opening, [await environment.step(turn) for turn in turns], environment
    finally:
        await environment.close()


async def gold_steps(family: EnvironmentFamily, task: Any, most: int = 200) -> list[Step]:
    """The steps of one who knows the solution."""
    environment: Any = family.make()
    steps: list[Step] = []
    try:
        await environment.reset(task)
        while len(steps) < most and not (steps and steps[-1].done):
            steps.append(await environment.step(await environment.gold()))
    finally:
        await environment.close()
    return steps
