"""An agent that calls two tools in one turn and talks to the model as real clients do, one way after another.

The task is two sums; each that stands in the last answer in its place earns half. Streams, retries, and requests that
are given up are drawn for every turn (`envs/agents/clients.py`), and none of them may make a difference to what is
trained.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field

from envs.agents.clients import WAYS, AnthropicClient, Client, OpenAiClient
from envs.agents.tool_loop import Sum, ToolLoopFamily, ToolLoopOptions, called, demonstrated
from rollout.episodes.environment import Demonstration, Endpoint, EnvironmentFamily, Outcome


class SdkAgentOptions(ToolLoopOptions):
    client: Literal["openai", "anthropic"] = "openai"
    """The client whose SDK the agent is written against."""
    tokens: int = Field(96, ge=1)
    """Longest answer that the agent asks for."""


@dataclass(frozen=True)
class TwoSums:
    sums: tuple[Sum, Sum]

    @property
    def question(self) -> str:
        first, second = self.sums
        return f"What is {first.words}, and what is {second.words}?"

    @property
    def answers(self) -> list[str]:
        return [str(each.answer) for each in self.sums]


class SdkAgent:
    """One episode; `chance` draws how each turn is asked for."""

    def __init__(self, options: SdkAgentOptions, chance: random.Random) -> None:
        self._options = options
        self._chance = chance

    async def run(self, task: TwoSums, endpoint: Endpoint) -> Outcome:
        kind = OpenAiClient if self._options.client == "openai" else AnthropicClient
        client: Client = kind(endpoint, self._options.tokens)
        counts = dict.fromkeys((*WAYS, "parallel_calls"), 0.0)
        history: list[Any] = [{"role": "user", "content": task.question}]
        said = ""

        try:
            for _ in range(self._options.turns):
                how = self._chance.choice(WAYS)
                counts[how] += 1

                answer = await client.ask(history, how)
                said = answer.text
                if not answer.calls:
                    break

                counts["parallel_calls"] += len(answer.calls) > 1
                history += client.turn(answer, [called(call.name, call.arguments) for call in answer.calls])
        finally:
            await client.close()

        words = said.split()
        right = sum(given == wanted for given, wanted in zip(words, task.answers, strict=False))
        solved = words == task.answers
        return Outcome(right / 2, solved, info=counts)

    async def close(self) -> None:
        pass


class SdkAgentFamily(ToolLoopFamily):
    Options: type[BaseModel] = SdkAgentOptions
    options: SdkAgentOptions

    def __init__(self, options: SdkAgentOptions, seed: int) -> None:
        super().__init__(options, seed)
        self._chance = random.Random(seed)

    def draw(self, chance: random.Random) -> Any:
        return TwoSums((super().draw(chance), super().draw(chance)))

    def make(self) -> Any:
        return SdkAgent(self.options, random.Random(self._chance.random()))


async def demonstrate(
    family: EnvironmentFamily, count: int, *, seed: int, mistakes: float, max_turns: int
) -> list[Demonstration]:
    """Two calls in one turn, and the answer that they gave."""
    tasks: list[TwoSums] = [family.task("train", index % family.task_count("train")) for index in range(count)]
    return [
        demonstrated(task.question, task.sums, random.Random(f"{seed} {index}")) for index, task in enumerate(tasks)
    ]
