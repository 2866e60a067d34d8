"""Episodes of the demonstrator in training games, through the environment itself: what the agent will read and write.

Some turns are mistakes on purpose, so that a model sees how to go on after "Nothing happens."; those are shown, not
imitated.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from envs.alfworld.expert import Explorer, blunder
from rollout.episodes.environment import ChatMessage, DemonstratedTurn, Demonstration, Environment, EnvironmentFamily

CONCURRENT = 32  # live environments
PIECE = r" ?[a-z]+ \d{1,3}(?!\d)| ?[A-Za-z]+\n?| ?[^\sA-Za-z\d]+\n*|\d{1,3}|\s+"
"""Pieces of a small model's tokenizer: a name with its number (`cabinet 3`) is one."""


async def demonstrate(
    family: EnvironmentFamily, count: int, *, seed: int, mistakes: float, max_turns: int
) -> list[Demonstration]:
    """`count` solved episodes over the training tasks, in order and again from the first; deterministic.

    `mistakes`: share of turns that are blunders. Episodes longer than `max_turns` are left out, so fewer may come.
    """
    limit = asyncio.Semaphore(CONCURRENT)
    tasks = family.task_count("train")
    form = getattr(getattr(family, "options", None), "action", "line")

    async def one(index: int) -> Demonstration | None:
        async with limit:
            rng = random.Random(f"{seed} {index}")
            share = mistakes if index % 2 else 0.0  # every other episode is flawless
            environment = family.make()
            try:
                return await play(environment, family.task("train", index % tasks), rng, share, max_turns, form)
            finally:
                await environment.close()

    played = await asyncio.gather(*(one(index) for index in range(count)))
    return [episode for episode in played if episode is not None]


async def play(
    environment: Environment, task: Any, rng: random.Random, mistakes: float, max_turns: int, form: str = "line"
) -> Demonstration | None:
    """One episode of the demonstrator; None if it is not solved within `max_turns`.

    `form`: how the environment reads a command, its option `action`.
    """
    opening = await environment.reset(task)
    explorer = Explorer(_text(opening))
    turns: list[DemonstratedTurn] = []

    for _ in range(max_turns):
        wrong = bool(turns) and rng.random() < mistakes
        command = blunder(explorer, rng) if wrong else explorer.next_command()
        written = command if form == "line" else f"<action>{command}</action>"
        step = await environment.step(written)
        explorer.observe(command, _text(step.messages))
        turns.append(DemonstratedTurn(written, not wrong, step.messages))
        if step.done:
            return Demonstration(opening, turns) if step.success else None
    return None


def _text(messages: Sequence[ChatMessage]) -> str:
    return "\n".join(message.content for message in messages if message.role != "system")
