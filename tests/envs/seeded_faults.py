"""A sound environment (add two numbers, in two turns), and what people get wrong when they write one, fault by fault.

Each fault names the check of `fresco env check` that has to find it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from envs.answers import tagged
from rollout.episodes.environment import ChatMessage, Step

FAULTS = {
    "tasks come from Python's hash": "elsewhere",
    "openings are drawn without a seed": "again",
    "rewards are noisy": "again",
    "observations tell the time": "again",
    "steps change the task": "again",
    "earlier episodes show": "again",
    "state is shared by episodes": "neighbours",
    "all tasks are one": "tasks differ",
    "held-out tasks are trained": "held out",
    "success is a share": "ends",
    "a step says nothing": "ends",
    "an empty turn raises": "bad output",
    "a long turn is worth nan": "bad output",
    "a zero byte hangs": "bad output",
    "bad numbers never end": "bad output",
    "a step sleeps on the loop": "deadlines",
    "closing fails": "deadlines",
    "files stay open": "flat",
    "processes stay": "flat",
    "memory stays": "flat",
    "temporary files stay": "flat",
    "tasks of the loop stay": "flat",
    "an empty answer is right": "nothing",
    "the answer anywhere is right": "cheats",
    "the prompt holds the answer": "cheats",
    "any answer is right": "another's gold",
    "the right answer is wrong": "gold",
    "length is rewarded": "gold",
}


class SumOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    fault: str = ""


@dataclass
class Sum:
    """Not frozen, so that a fault can change it."""

    left: int
    right: int


class SumFamily:
    Options: type[BaseModel] = SumOptions

    def __init__(self, options: SumOptions, seed: int) -> None:
        assert options.fault in ("", *FAULTS)
        self.fault = options.fault
        self.seed = seed
        self.tasks: dict[tuple[str, int], Sum] = {}
        self.episodes = itertools.count()
        self.shared: dict[str, Any] = {"kept": []}

    def task_count(self, split: str) -> int:
        return 500 if split == "train" else 40

    def task(self, split: str, index: int) -> Sum:
        if self.fault == "held-out tasks are trained":
            split = "train"
        if self.fault == "all tasks are one":
            index = 0
        if (split, index) not in self.tasks:
            draw = random.Random(f"{self.seed} {split} {index}")
            if self.fault == "tasks come from Python's hash":
                draw = random.Random(hash((split, index)))
            self.tasks[split, index] = Sum(draw.randrange(1000, 9000), draw.randrange(1000, 9000))
        return self.tasks[split, index]

    async def start(self) -> None: ...

    def make(self) -> SumEnvironment:
        return SumEnvironment(self)

    async def stop(self) -> None:
        for process in self.shared.get("processes", []):
            process.kill()
            process.wait()
        for path in self.shared.get("paths", []):
            os.unlink(path)
        for task in self.shared.get("tasks", []):
            task.cancel()


class SumEnvironment:
    def __init__(self, family: SumFamily) -> None:
        self.family = family
        self.fault = family.fault
        self.turn = 0
        self.leave_behind()

    async def reset(self, task: Sum) -> list[ChatMessage]:
        self.sum = task
        self.answer = str(task.left + task.right)
        if self.fault == "state is shared by episodes":
            self.family.shared["answer"] = self.answer

        asks = f"{task.left} + {task.right}? First think, then <answer>N</answer>."
        match self.fault:
            case "openings are drawn without a seed":
                asks = f"{random.choice(['Add:', 'Sum:', 'Plus:', 'What is'])} {random.random()} {asks}"
            case "earlier episodes show":
                asks = f"Episode {next(self.family.episodes) // 3}: {asks}"
            case "the prompt holds the answer":
                asks = f"<answer>{self.answer}</answer> is to be found. {asks}"
        return [ChatMessage("user", asks)]

    async def step(self, action: str, truncated: bool = False) -> Step:
        self.turn += 1
        await self.misbehave(action)
        if self.turn == 1:
            said = [] if self.fault == "a step says nothing" else [ChatMessage("user", self.hint())]
            return Step(said, 0.0, False, False)
        success = self.is_right(action)
        return Step([], self.reward(action, success), True, success)

    def hint(self) -> str:
        if self.fault == "observations tell the time":
            return f"It is {time.monotonic_ns()}. Now answer."
        if self.fault == "steps change the task":
            self.sum.left += 1
        return "Now answer."

    def is_right(self, action: str) -> Any:
        said = tagged(action, "answer")
        match self.fault:
            case "an empty answer is right":
                return not action or said == self.answer
            case "the answer anywhere is right":
                return self.answer[-2:] in action
            case "the prompt holds the answer":
                return f"<answer>{self.answer}</answer>" in action
            case "any answer is right":
                return said is not None and said.isdecimal()
            case "the right answer is wrong":
                return said == f"{self.answer} "
            case "success is a share":
                return 0.5
            case "state is shared by episodes":
                return said == self.family.shared["answer"] and len(action) < 10**6
        return said == self.answer

    def reward(self, action: str, success: bool) -> float:
        match self.fault:
            case "rewards are noisy":
                return random.gauss(float(success), 0.1)
            case "a long turn is worth nan" if len(action) > 50_000:
                return float("nan")
            case "length is rewarded":
                return float(success) + len(action) / 100
            case "state is shared by episodes":
                return float(self.family.shared["answer"] == self.answer) + float(success)
        return float(success)

    async def misbehave(self, action: str) -> None:
        match self.fault:
            case "an empty turn raises" if not action:
                raise IndexError("list index out of range")
            case "a zero byte hangs" if "\x00" in action:
                await asyncio.Event().wait()
            case "bad numbers never end" if "9" * 6000 in action:
                while True:
                    self.turn += 1
            case "a step sleeps on the loop" if "9**9**9" in action:
                time.sleep(1.6)

    def leave_behind(self) -> None:
        shared = self.family.shared
        match self.fault:
            case "files stay open":
                shared["kept"].append(open("/dev/null", "rb"))  # noqa: SIM115
            case "processes stay":
                shared.setdefault("processes", []).append(subprocess.Popen(["sleep", "600"]))
            case "memory stays":
                shared["kept"].append(bytearray(os.urandom(1) * 1_000_000))
            case "temporary files stay":
                descriptor, path = tempfile.mkstemp()
                os.close(descriptor)
                shared.setdefault("paths", []).append(path)
            case "tasks of the loop stay":
                shared.setdefault("tasks", []).append(asyncio.ensure_future(asyncio.Event().wait()))

    async def gold(self) -> str:
        return "I think." if self.turn == 0 else f"<answer>{self.answer}</answer>"

    async def close(self) -> None:
        if self.fault == "closing fails" and self.turn:
            raise OSError("device or resource busy")
