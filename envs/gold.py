"""Demonstrations by environments that know how their tasks are solved (`rollout.episodes.environment.Solvable`)."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

from rollout.episodes.environment import DemonstratedTurn, Demonstration, Environment, EnvironmentFamily, Solvable

CONCURRENT = 32  # live environments
_DRAWS = 64  # of tasks, until one is of the same type


async def demonstrate(
    family: EnvironmentFamily, count: int, *, seed: int, mistakes: float, max_turns: int, slips: float = 0.0
) -> list[Demonstration]:
    """`count` episodes over the training tasks, evenly spread; those that are not solved are left out.

    `mistakes`: share of turns, in every other episode, in which what was right in another place is written instead. A
    mistake is shown and not imitated. `slips`: share of all turns in which the same happens and is imitated, so a slip
    stays, solved or not. An episode depends on the seed and its number alone.
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
                player = Player(family, task, rng, mistakes if index % 2 else 0.0, slips)
                return await player.play(environment, max_turns)
            finally:
                await environment.close()

    played = await asyncio.gather(*(one(index) for index in range(count)))
    return [episode for episode in played if episode is not None]


@dataclass(frozen=True)
class Player:
    """One who knows the solution, and errs now and then."""

    family: EnvironmentFamily
    task: Any
    rng: random.Random
    mistakes: float
    slips: float

    async def play(self, environment: Environment, max_turns: int) -> Demonstration | None:
        """One episode; None if it is not solved within `max_turns`, or nobody knows how, although there was no slip."""
        if not isinstance(environment, Solvable):
            return None
        # Before this one is open: a family may have room for few.
        another = await self._right_in_another_task() if self._slips() else None
        opening = await environment.reset(self.task)
        turns: list[DemonstratedTurn] = []
        written: list[str] = []
        slipped = False

        for _ in range(max_turns):
            action = await environment.gold()
            if action is None:
                break

            slip = self._slips() if written else another is not None
            mistake = bool(written) and self.rng.random() < self.mistakes
            shown = action if written or another is None else another
            if written and (slip or mistake):
                shown = self.rng.choice(written)
            slipped |= slip
            written.append(action)

            step = await environment.step(shown)
            turns.append(DemonstratedTurn(shown, slip or not mistake, step.messages))
            if step.done:
                return Demonstration(opening, turns) if step.success or slipped else None
        return Demonstration(opening, turns) if slipped else None

    def _slips(self) -> bool:
        return self.slips > 0 and self.rng.random() < self.slips

    async def _right_in_another_task(self) -> str | None:
        """What is right in the first turn of one of the same type; None: nobody knows."""
        kind = getattr(self.task, "task_type", None)
        other = self.task
        for _ in range(_DRAWS):
            other = self.family.task("train", self.rng.randrange(self.family.task_count("train")))
            if getattr(other, "task_type", None) == kind:
                break

        environment = self.family.make()
        try:
            await environment.reset(other)
            assert isinstance(environment, Solvable)
            return await environment.gold()
        finally:
            await environment.close()
