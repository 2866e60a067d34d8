"""Plays every data set of reasoning-gym and every toy-text game of Gymnasium by adapter, without code for any of them.

    python -m experiments.adapters --out experiments/results/adapters/README.md

Of each: two held-out tasks by someone who knows the solution, where anybody does, and two by an agent that writes
words at random. A data set counts as played if no episode fails.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envs.check import agents
from envs.check.findings import Earned
from envs.check.player import Agent, Player, PlayResult
from envs.registry import make_family
from rl.config.schema import ConfigError, load_config

TASKS = 2
TURNS = 60
NEEDS_OPTIONS = frozenset({"composite"})  # a mixture of other data sets: nothing by itself


@dataclass(frozen=True)
class Row:
    name: str
    gold: str
    at_random: str
    seconds: float
    error: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    rows = []
    for family, option, name in every():
        if arguments.only in name:
            rows.append(asyncio.run(play(family, option, name)))
            print(*vars(rows[-1]).values(), sep="  ", flush=True)

    text = page(rows)
    print(text.splitlines()[2])
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
    return 0


def every() -> Iterator[tuple[str, str, str]]:
    """(environment, option, name) of all that there is."""
    import gymnasium
    from reasoning_gym.factory import DATASETS

    for name, spec in sorted(gymnasium.registry.items()):
        if "toy_text" in str(spec.entry_point):
            yield "gymnasium", "id", name
    for name in sorted(set(DATASETS) - NEEDS_OPTIONS):
        yield "reasoning_gym", "dataset", name


async def play(environment: str, option: str, name: str) -> Row:
    begin = time.monotonic()
    deadlines = ["env.options.request_deadline_s=100", "env.step_deadline_s=120"]
    overrides = [f"env.name={environment}", f"env.options.{option}={name}", f"env.max_turns={TURNS}", *deadlines]
    try:
        config = load_config(None, overrides)
        family = make_family(config)
    except ConfigError as error:
        return Row(name, "", "", time.monotonic() - begin, str(error))

    await family.start()
    try:
        player = Player(family, config)
        chance = await _outcomes(player, agents.at_random)
        try:
            gold = await _outcomes(player, agents.gold)
        except agents.NoSolution:
            gold = []
    finally:
        await family.stop()

    failed = next((outcome.error for outcome in [*chance, *gold] if outcome.error), "")
    return Row(name, _said("gold", gold), _said("at random", chance), time.monotonic() - begin, failed)


async def _outcomes(player: Player, agent: Agent) -> list[PlayResult]:
    return [await player.play(index, agent, "eval") for index in range(TASKS)]


def _said(agent: str, outcomes: list[PlayResult]) -> str:
    return f"{Earned.of(agent, outcomes).reward:.2f}" if outcomes else "-"


def page(rows: list[Row]) -> str:
    played = [row for row in rows if not row.error]
    proven = [row for row in played if row.gold.startswith("1.00")]
    lines = [
        "# Environments by adapter",
        "",
        f"{len(played)} of {len(rows)} played without an error; in {len(proven)} the solution earns 1 in each of "
        f"{TASKS} held-out tasks.",
        "",
        "Made by `python -m experiments.adapters --out experiments/results/adapters/README.md`. Mean reward of one who "
        "knows the solution (`-`: nobody does), and of words at random.",
        "",
        "| environment | solution | at random | seconds | error |",
        "|---|---|---|---|---|",
        *(f"| {row.name} | {row.gold} | {row.at_random} | {row.seconds:.1f} | {row.error} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
