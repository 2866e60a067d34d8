"""What the games of a folder are like: rooms, walkthroughs, scenes, and what the demonstrator wins in so many turns.

    python -m envs.alfworld.describe FOLDER [--turns 30] [--play 48]

Official data has the same layout, so the same command says how games made here differ from it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from envs.alfworld.demonstrations import demonstrate
from envs.alfworld.environment import AlfworldFamily, AlfworldOptions
from envs.alfworld.games import SPLITS, list_games

_RECEPTACLE = re.compile(r"\(receptacleType [^?]")  # the goal has variables
_OBJECT = re.compile(r"\(objectType [^?]")


@dataclass(frozen=True)
class Split:
    """What is counted in the games of one split: per game receptacles, objects and commands of the walkthrough (0: none
    is kept)."""

    types: Counter[str]
    scenes: frozenset[int]
    goals: frozenset[str]  # type, object and place, without the scene
    receptacles: list[int]
    objects: list[int]
    commands: list[int]


def describe(folder: Path, split: str) -> Split:
    """Raises GamesError."""
    games = list_games(folder, split)
    contents = [json.loads(game.path.read_text()) for game in games]
    problems = [content["pddl_problem"] for content in contents]

    return Split(
        types=Counter(game.task_type for game in games),
        scenes=frozenset(game.scene for game in games),
        goals=frozenset(game.path.parent.parent.name.rpartition("-")[0] for game in games),
        receptacles=[len(_RECEPTACLE.findall(problem)) for problem in problems],
        objects=[len(_OBJECT.findall(problem)) for problem in problems],
        commands=[len(content.get("walkthrough") or ()) for content in contents],
    )


def played(folder: Path, count: int, turns: int) -> list[int]:
    """Turns that the demonstrator needs in the training games that it wins within `turns`, of the first `count`."""
    family = AlfworldFamily(AlfworldOptions(data=folder, max_steps=turns), 0)

    async def play() -> list[int]:
        await family.start()
        try:
            won = await demonstrate(family, count, seed=0, mistakes=0.0, max_turns=turns)
            return [len(episode.turns) for episode in won]
        finally:
            await family.stop()

    return asyncio.run(play())


def _spread(values: Sequence[int]) -> str:
    return f"{median(values):g} ({min(values)} to {max(values)})" if values else "none"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.alfworld.describe", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--play", type=int, default=0, metavar="GAMES", help="training games for the demonstrator")
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args(argv)
    splits = {name: describe(options.folder, name) for name in SPLITS if (options.folder / name).is_dir()}

    for name, split in splits.items():
        trained = splits.get("train", split)
        scenes = f"{len(split.scenes)} scenes ({len(split.scenes & trained.scenes)} of them in train)"
        goals = f"{len(split.goals)} goals ({len(split.goals & trained.goals)} of them in train)"
        print(f"{name}: {len(split.commands)} games, {scenes}, {goals}")
        print(f"  receptacles {_spread(split.receptacles)}, objects {_spread(split.objects)}")
        print(f"  commands of a walkthrough {_spread(split.commands)}")
        print("  " + ", ".join(f"{kind} {count}" for kind, count in sorted(split.types.items())))

    if options.play:
        turns = played(options.folder, options.play, options.turns)
        print(f"demonstrator: {len(turns)} of {options.play} won within {options.turns} turns, in {_spread(turns)}")


if __name__ == "__main__":
    main()
