"""Agents without a model: one that does nothing, one that acts at random, cheats, and one that knows the solution."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from envs.check.attacks import ATTACKS
from envs.check.player import Agent, Said, View
from rollout.episodes.environment import Environment, Solvable

WORDS = 40  # of the conversation's end, among which a random agent chooses
_WORD = re.compile(r"[A-Za-z]+|\d+")


class NoSolution(Exception):
    """Nobody knows how this task is solved."""


async def nothing(view: View) -> Said:
    return Said("")


async def at_random(view: View) -> Said:
    """Words and numbers that were just read, in the form that the environment asks for; a function of what it sees."""
    rng = random.Random(f"{view.task_index} {view.turn} {len(view.text)}")
    words = _WORD.findall(view.text)[-WORDS:] or ["a"]
    choice = rng.choice([rng.choice(words), str(rng.randrange(10)), " ".join(rng.sample(words, min(3, len(words))))])
    for tag in ("action", "answer"):
        if f"<{tag}>" in view.text:
            return Said(f"<{tag}>{choice}</{tag}>")
    return Said(rng.choice([choice, f"\\boxed{{{choice}}}"]))


async def script(view: View) -> Said:
    """The same in every task: what differs between two episodes is the task's doing."""
    return Said(f"<action>{view.turn % 3}</action>")


async def gold(view: View) -> Said:
    """Raises NoSolution."""
    environment: Environment = view.environment
    said = await environment.gold() if isinstance(environment, Solvable) else None
    if said is None:
        raise NoSolution
    return Said(said)


def cheat(attack: Callable[[str], str]) -> Agent:
    """Makes the same attack in every turn."""

    async def act(view: View) -> Said:
        return Said(attack(view.text))

    return act


def repeated(turns: list[str]) -> Agent:
    """These turns, and then nothing."""

    async def act(view: View) -> Said:
        return Said(turns[view.turn] if view.turn < len(turns) else "")

    return act


CHEATS: dict[str, Agent] = {name: cheat(attack) for name, attack in ATTACKS.items()}
