"""How hard the tasks are for a model at an endpoint: tasks by the share of its tries that solve them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from envs.check.player import Player, Said, View

Complete = Callable[[str], Awaitable[str]]


@dataclass(frozen=True)
class Model:
    """`complete`: from the conversation so far to the next turn."""

    complete: Complete
    tries: int = 4
    at_once: int = 16


async def difficulty(player: Player, indices: Sequence[int], model: Model) -> list[int]:
    """Held-out tasks in ten equal parts of the share of tries that solve them, and those that every try solves."""
    free = asyncio.Semaphore(model.at_once)

    async def act(view: View) -> Said:
        return Said(await model.complete(view.text))

    async def share(index: int) -> float:
        solved = 0
        for _ in range(model.tries):
            async with free:
                solved += (await player.play(index, act, "eval")).success
        return solved / model.tries

    histogram = [0] * 11
    for each in await asyncio.gather(*map(share, indices)):
        histogram[int(10 * each)] += 1
    return histogram


def endpoint(url: str, name: str, temperature: float = 1.0) -> Complete:
    """A model behind OpenAI's Chat Completions; the conversation is one message."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY") or "none", timeout=120)

    async def complete(text: str) -> str:
        reply = await client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": text}], temperature=temperature
        )
        return reply.choices[0].message.content or ""

    return complete
