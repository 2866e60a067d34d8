"""An environment that goes wrong in the way its task asks for."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from pydantic import BaseModel

from rollout.episodes.environment import ChatMessage, Step

KINDS = ("hang", "raise", "exit", "nan", "fine", "long", "stubborn", "fine")


class FaultyOptions(BaseModel):
    folder: str = ""
    """While the family is up, a file `up` stands in it."""
    start_fails: bool = False
    tools: bool = False
    late: bool = False  # tasks are known after the start only


class FaultyFamily:
    Options: type[BaseModel] = FaultyOptions

    def __init__(self, options: FaultyOptions, seed: int) -> None:
        self.options = options
        self.tools = options.tools
        self.closed = 0
        self.knows_tasks = not options.late

    def task_count(self, split: str) -> int:
        return len(KINDS)

    def task(self, split: str, index: int) -> str:
        return KINDS[index]

    async def start(self) -> None:
        if self.options.folder:
            Path(self.options.folder, "up").touch()
        if self.options.start_fails:
            raise RuntimeError("start fails")

    def make(self) -> FaultyEnvironment:
        return FaultyEnvironment(self)

    async def stop(self) -> None:
        if self.options.folder:
            Path(self.options.folder, "up").unlink()
        if self.options.start_fails:
            raise RuntimeError("stop fails as well")


class FaultyEnvironment:
    def __init__(self, family: FaultyFamily) -> None:
        self.family = family

    async def reset(self, task: str) -> list[ChatMessage]:
        self.kind = task
        return [ChatMessage("user", " ".join(["1"] * (100 if task == "long" else 4)))]

    async def step(self, action: str, truncated: bool = False) -> Step:
        if self.kind == "hang":
            await asyncio.Event().wait()
        while self.kind == "stubborn":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass

        if self.kind == "raise":
            raise ValueError("on purpose \ud83d")  # half of an emoji, which no message can carry
        if self.kind == "exit":
            sys.exit(3)
        reward = float("nan") if self.kind == "nan" else 1.0
        return Step([], reward, True, True, {"closed": float(self.family.closed)})

    async def close(self) -> None:
        self.family.closed += 1
        if self.kind == "raise":
            raise RuntimeError("close fails as well")
