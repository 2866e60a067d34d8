"""Scripted agents on the environment itself: one that edits as the gold patch does, one that does nothing.

`demonstrate` is the demonstrator of `model.warm_start`: it shows a model the form of a whole episode (look, edit,
submit), not how a bug is found.

    python -m envs.swe.demonstrations tasks.jsonl     plays both agents on every task of a file
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from envs.swe.environment import SweFamily, SweOptions
from envs.swe.gold import gold_turns
from envs.swe.tasks import SweTask
from envs.swe.tool_calls import ToolCall, render_call
from rollout.episodes.environment import DemonstratedTurn, Demonstration, Environment, EnvironmentFamily

CONCURRENT = 4


async def demonstrate(
    family: EnvironmentFamily, count: int, *, seed: int, mistakes: float, max_turns: int
) -> list[Demonstration]:
    """`count` solved episodes over the training tasks, in order and again from the first; deterministic.

    `mistakes`: share of episodes that begin with a malformed call, shown but not imitated.
    """
    limit = asyncio.Semaphore(CONCURRENT)

    async def one(index: int) -> Demonstration | None:
        rng = random.Random(f"{seed} {index}")
        task = family.task("train", index)
        malformed = [f"I fix {task.repo}."] if rng.random() < mistakes else []
        turns = gold_turns(task)
        if turns is None or len(turns) + len(malformed) > max_turns:
            return None
        async with limit:
            return await play(family.make, task, malformed, turns)

    distinct = range(min(count, family.task_count("train")))
    played = await asyncio.gather(*map(one, distinct))
    solved = [episode for episode in played if episode is not None]
    return [solved[index % len(solved)] for index in range(count)] if solved else []


async def play(
    make: Callable[[], Environment], task: SweTask, malformed: Sequence[str], turns: Sequence[str]
) -> Demonstration | None:
    """One episode, in which `malformed` come before `turns`; None if it did not solve the task."""
    environment = make()
    try:
        opening = await environment.reset(task)
        shown: list[DemonstratedTurn] = []
        for number, action in enumerate([*malformed, *turns]):
            step = await environment.step(action)
            shown.append(DemonstratedTurn(action, number >= len(malformed), step.messages))
            if step.done:
                return Demonstration(opening, shown) if step.success else None
        return None
    finally:
        await environment.close()


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.swe.demonstrations", description=__doc__)
    parser.add_argument("tasks", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)

    begin = time.monotonic()
    rewards = asyncio.run(_play_all(options.tasks))
    seconds = time.monotonic() - begin
    gold, idle = (sum(pair[agent] for pair in rewards.values()) for agent in (0, 1))

    print(f"{len(rewards)} tasks in {seconds:.0f} s: the gold agent earned {gold:g}, the idle one {idle:g}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rewards, indent=1) + "\n")


async def _play_all(path: Path) -> dict[str, tuple[float, float]]:
    """(reward of the gold agent, reward of the idle one) by task."""
    family = SweFamily(SweOptions(source=str(path), eval_count=0, threads=CONCURRENT, sandboxes=CONCURRENT), 0)
    await family.start()
    limit = asyncio.Semaphore(CONCURRENT)

    async def both(task: SweTask) -> tuple[float, float]:
        async with limit:
            gold = gold_turns(task)
            solved = None if gold is None else await play(family.make, task, [], gold)
            idle = await play(family.make, task, [], [render_call(ToolCall("submit", {}))])
        return float(solved is not None), float(idle is not None)

    tasks = [family.task("train", index) for index in range(family.task_count("train"))]
    try:
        rewards = await asyncio.gather(*map(both, tasks))
    finally:
        await family.stop()
    return {task.instance_id: pair for task, pair in zip(tasks, rewards, strict=True)}


if __name__ == "__main__":
    main(sys.argv[1:])
