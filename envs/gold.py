"""Demonstrations by environments that know how their tasks are solved (`rollout.episodes.environment.Solvable`)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from rollout.episodes.environment import DemonstratedTurn, Demonstration, Environment, EnvironmentFamily, Solvable

CONCURRENT = 32  # live environments


async def demonstrate(
    family: EnvironmentFamily, count: int, *, seed: int, mistakes: float, max_turns: int
) -> list[Demonstration]:
    """`count` episodes over the training tasks, evenly spread; those that are not solved are left out.

    `mistakes`: share of turns, in every other episode, in which what was right in another place is written instead. A
    mistake is shown and not imitated. An episode depends on the seed and its number alone.
    """
    limit = asyncio.Semaphore(CONCURRENT)
    tasks = family.task_count("train")
    order = random.Random(f"{seed}").sample(range(tasks), min(tasks, count))

    async def one(index: int) -> Demonstration | None:
        async with limit:
            rng = random.Random(f"{seed} {index}")
            environment = family.make()
            try:
                task = family.task("train", order[index % len(order)])
                return await play(environment, task, rng, mistakes if index % 2 else 0.0, max_turns)
            finally:
                await environment.close()

    played = await asyncio.gather(*(one(index) for index in range(count)))
    return [episode for episode in played if episode is not None]


async def play(
    environment: Environment, task: Any, rng: random.Random, mistakes: float, max_turns: int
) -> Demonstration | None:
    """One episode; None if it is not solved within `max_turns`, or nobody knows how."""
    if not isinstance(environment, Solvable):
        return None
    opening = await environment.reset(task)
    turns: list[DemonstratedTurn] = []
    written: list[str] = []

    for _ in range(max_turns):
        action = await environment.gold()
        if action is None:
            return None
        wrong = bool(written) and rng.random() < mistakes
        shown = rng.choice(written) if wrong else action
        written.append(action)
        step = await environment.step(shown)
        turns.append(DemonstratedTurn(shown, not wrong, step.messages))
        if step.done:
            return Demonstration(opening, turns) if step.success else None
    return None
