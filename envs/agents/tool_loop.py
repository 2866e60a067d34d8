"""An agent written against the SDK of OpenAI: it asks the model, calls the tools that the model asks for, and goes on.

The task is a sum in words, the tools are three operations, and what counts is the last answer. `ToolLoop.run` is all
that an agent needs; the rest of this file makes tasks and shows them to a tiny model.
"""

from __future__ import annotations

import json
import operator
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rollout.episodes.environment import (
    ChatMessage,
    DemonstratedTurn,
    Demonstration,
    Endpoint,
    EnvironmentFamily,
    Outcome,
)

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
}
_WORDS = {"add": "plus", "subtract": "minus", "multiply": "times"}
SLIP = 0.4  # share of demonstrations that call another operation: what is left to learn
_PARAMETERS = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"{name} two numbers", "parameters": _PARAMETERS}}
    for name in OPERATIONS
]


class ToolLoopOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    tasks: int = Field(2000, ge=1)
    """Training tasks."""
    eval_tasks: int = Field(256, ge=0)
    largest: int = Field(20, ge=2)
    """Numbers are drawn from 1 to this."""
    turns: int = Field(3, ge=1)
    """Answers of the model after which the agent gives up."""


@dataclass(frozen=True)
class Sum:
    operation: str
    a: int
    b: int

    @property
    def words(self) -> str:
        return f"{self.a} {_WORDS[self.operation]} {self.b}"

    @property
    def question(self) -> str:
        return f"What is {self.words}?"

    @property
    def answer(self) -> int:
        return OPERATIONS[self.operation](self.a, self.b)


class ToolLoop:
    """One episode. Nothing in `run` knows of training: the endpoint is a server of OpenAI's API."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def run(self, task: Sum, endpoint: Endpoint) -> Outcome:
        from openai import AsyncOpenAI  # takes a second to import, which only the environment server should pay

        calls = 0
        said = ""
        messages: list[Any] = [{"role": "user", "content": task.question}]
        async with AsyncOpenAI(**endpoint.openai) as client:
            for _ in range(self._turns):
                answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
                message = answer.choices[0].message
                messages.append(message)
                said = message.content or ""
                if not message.tool_calls:
                    break

                for call in message.tool_calls:
                    assert call.type == "function"
                    calls += 1
                    result = called(call.function.name, call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

        solved = said.strip() == str(task.answer)
        return Outcome(float(solved), solved, info={"tool_calls": float(calls)})

    async def close(self) -> None:
        pass


def called(name: str, arguments: str) -> str:
    """What a tool answers; never raises for what a model wrote."""
    try:
        values = json.loads(arguments)
        a = values["a"]
        b = values["b"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "error: a and b are wanted"
    whole = all(type(value) is int and abs(value) < 10**6 for value in (a, b))
    return str(OPERATIONS[name](a, b)) if name in OPERATIONS and whole else "error: no such sum"


class ToolLoopFamily:
    Options: type[BaseModel] = ToolLoopOptions
    foreign = True

    def __init__(self, options: ToolLoopOptions, seed: int) -> None:
        self.options = options
        self.seed = seed

    def task_count(self, split: str) -> int:
        return self.options.tasks if split == "train" else self.options.eval_tasks

    def task(self, split: str, index: int) -> Any:
        """One task in five belongs to the held-out split, and never to the other."""
        chance = random.Random(f"{self.seed} {split} {index}")
        while True:
            found = self.draw(chance)
            if (zlib.crc32(found.question.encode()) % 5 == 0) == (split == "eval"):
                return found

    def draw(self, chance: random.Random) -> Any:
        """A task of either split, with its `question`."""
        largest = self.options.largest
        return Sum(chance.choice(list(OPERATIONS)), chance.randint(1, largest), chance.randint(1, largest))

    async def start(self) -> None:
        pass

    def make(self) -> Any:
        return ToolLoop(self.options.turns)

    async def stop(self) -> None:
        pass


async def demonstrate(
    family: EnvironmentFamily, count: int, *, seed: int, mistakes: float, max_turns: int
) -> list[Demonstration]:
    """One call and the answer that it gave."""
    tasks: list[Sum] = [family.task("train", index % family.task_count("train")) for index in range(count)]
    return [demonstrated(task.question, [task], random.Random(f"{seed} {index}")) for index, task in enumerate(tasks)]


def demonstrated(question: str, sums: Sequence[Sum], chance: random.Random) -> Demonstration:
    """A call for each sum in one turn, and their answers; a share calls a wrong operation, which RL has to unlearn."""
    calls = []
    results = []
    for each in sums:
        slips = chance.random() < SLIP
        name = chance.choice(list(OPERATIONS)) if slips else each.operation
        arguments = json.dumps({"a": each.a, "b": each.b})
        calls.append(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
        results.append(called(name, arguments))

    turns = [
        DemonstratedTurn("\n".join(calls), True, [ChatMessage("tool", result) for result in results]),
        DemonstratedTurn(" ".join(results), True, []),
    ]
    return Demonstration([ChatMessage("user", question)], turns)
