"""Agents that own their loop, for tests: the SDK of OpenAI, asked by ids as text (no model), on the synthetic tasks."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
from pydantic import BaseModel, ConfigDict

from rollout.episodes.environment import Endpoint, Outcome, RewardFailed


class LoopOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    turns: int = 3
    does: str = "append"
    """append | branch | nothing | raise | hang | shout | read | unsure | broken | ungraded | crash"""


class OpenAiLoop:
    def __init__(self, options: LoopOptions) -> None:
        self.options = options

    async def run(self, task: int, endpoint: Endpoint) -> Outcome:
        does = self.options.does
        if does == "raise":
            raise RuntimeError("the agent broke")
        if does == "nothing":
            return Outcome(1.0, True)

        client = openai.AsyncOpenAI(**endpoint.openai, max_retries=0, timeout=240)
        if does == "hang":
            await asyncio.Event().wait()
        messages: list[Any] = [{"role": "user", "content": f"{task + 2} 3 4"}]
        if does == "read":
            async for chunk in await client.chat.completions.create(model="m", messages=messages, stream=True):
                if chunk.choices[0].delta.content:
                    raise RuntimeError(f"it has read {chunk.choices[0].delta.content}")

        rewards = {}
        for turn in range(self.options.turns):
            answer = await client.chat.completions.create(model="m", messages=messages)
            rewards[answer.id] = 0.25
            if does == "append" or turn == 0:
                messages += [answer.choices[0].message, {"role": "user", "content": "9"}]
        if does == "crash":
            raise KeyError("it cannot parse the answer")
        if does == "ungraded":
            raise RewardFailed("grade raised ValueError: no rubric")
        if does in ("unsure", "broken"):
            return Outcome(None if does == "unsure" else float("nan"), True)
        if does == "shout":
            return Outcome(1.0, True, {"resp-77": 1.0})
        return Outcome(1.0, True, rewards, {"asked": float(self.options.turns)})

    async def close(self) -> None: ...


class LoopFamily:
    Options = LoopOptions
    foreign = True

    def __init__(self, options: LoopOptions, seed: int) -> None:
        self.options = options

    def task_count(self, split: str) -> int:
        return 100

    def task(self, split: str, index: int) -> int:
        return index

    async def start(self) -> None: ...

    def make(self) -> Any:
        return OpenAiLoop(self.options)

    async def stop(self) -> None: ...
