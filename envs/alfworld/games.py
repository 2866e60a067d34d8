"""Makes ALFWorld games offline, in the official layout, and lists the games of a folder.

    python -m envs.alfworld.games --out data/alfworld --train 1000 --unseen 256

    FOLDER/{train,valid_seen,valid_unseen}/TASK-OBJECT-None-PARENT-SCENE/trial_…/{game.tw-pddl,traj_data.json}

Every game is won in the engine by a walkthrough before it is written, none is won at its start, and no two are alike,
across splits as well. `valid_seen` has new games in training scenes, `valid_unseen` scenes that training never sees.
A folder is whole or not there, and made once for its recipe. Official data has the same layout: point at it instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH
from pydantic import BaseModel, ConfigDict, Field, field_validator

from envs.alfworld import engine, grammar, oracle, scenes, translation
from envs.alfworld.engine import Engine, PreparedGame
from envs.alfworld.oracle import Oracle
from envs.alfworld.scenes import TASK_TYPES, Infeasible, Problem, draw_problem, scenes_of
from envs.alfworld.translation import GameError, GameFile, kept_translation
from rl.store.made_once import cache_folder, digest, made_once, to_stderr
from rl.wire.process import die_with_parent

SPLITS = ("train", "valid_seen", "valid_unseen")
GAME_FILE = "game.tw-pddl"
TRAJECTORY_FILE = "traj_data.json"
RECIPE_FILE = "recipe.json"
_SOURCES = (engine.__file__, grammar.__file__, oracle.__file__, scenes.__file__, translation.__file__, __file__)
_DRAWS = 200  # of one game before the recipe is called impossible
_CHUNK = 8  # games per job


class GamesError(ValueError):
    """Games that cannot be made or found; the message says what to change."""


class GameRecipe(BaseModel):
    """Everything that a folder of games depends on, besides the sources."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    train: int = Field(1000, ge=0)
    """Games in training scenes."""
    valid_seen: int = Field(0, ge=0)
    """Further games in training scenes, held out."""
    valid_unseen: int = Field(256, ge=0)
    """Games in the scenes that training never sees."""
    seed: int = 0
    task_types: tuple[str, ...] = TASK_TYPES
    """The types of tasks, in turn; any of the six."""
    max_receptacles: int | None = Field(None, ge=2)
    """Receptacles of a room; None: all of the floor plan."""
    clutter: tuple[int, int] = (12, 30)
    """Bounds of the objects that nobody asks for."""

    @field_validator("task_types")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or (unknown := [each for each in value if each not in TASK_TYPES]):
            raise ValueError(f"unknown task type {unknown[0]!r}" if value else "at least one task type is needed")
        return value

    @field_validator("clutter")
    @classmethod
    def _ordered(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= value[0] <= value[1]:
            raise ValueError("two bounds, the lower first")
        return value

    def fingerprint(self) -> str:
        """16 hex digits that change with any field and with the sources that make the games."""
        return digest(self.model_dump_json(), *_SOURCES)


@dataclass(frozen=True)
class GameEntry:
    """A playable game of a folder."""

    path: Path  # of its game.tw-pddl
    task_type: str
    scene: int


def ensure_games(
    recipe: GameRecipe,
    folder: Path | None = None,
    workers: int | None = None,
    log: Callable[[str], None] = to_stderr,
) -> Path:
    """The folder with this recipe's games; made first if it is not there, by one process while others wait.

    Raises GamesError if `folder` holds something else, or the recipe cannot be met.
    """
    fingerprint = recipe.fingerprint()
    target = folder or cache_folder() / f"alfworld-{fingerprint}"

    def make(draft: Path) -> None:
        if target.exists() and any(target.iterdir()) and _fingerprint_of(target) is None:
            raise GamesError(f"{target} holds files that were not made here; choose another folder")

        _make(recipe, draft, workers or len(os.sched_getaffinity(0)), log)
        (draft / RECIPE_FILE).write_text(json.dumps({"fingerprint": fingerprint, **recipe.model_dump()}))

    return made_once(target, make, fits=lambda folder: _fingerprint_of(folder) == fingerprint)


def games_made(recipe: GameRecipe) -> bool:
    """Whether the cache has this recipe's games."""
    fingerprint = recipe.fingerprint()
    return _fingerprint_of(cache_folder() / f"alfworld-{fingerprint}") == fingerprint


def list_games(folder: Path, split: str, task_types: Sequence[str] = TASK_TYPES) -> list[GameEntry]:
    """The games that `AlfredTWEnv` would play of this split, sorted by path. Raises GamesError."""
    root = folder / split
    if not root.is_dir():
        raise GamesError(f"{folder} has no split {split!r}; it has {sorted(p.name for p in folder.glob('*/'))}")
    games = []
    for path in sorted(root.glob(f"**/{GAME_FILE}")):
        trajectory_file = path.with_name(TRAJECTORY_FILE)
        if "movable" in str(path) or "Sliced" in str(path) or not trajectory_file.exists():
            continue
        trajectory = json.loads(trajectory_file.read_text())
        if trajectory["task_type"] in task_types and json.loads(path.read_text()).get("solvable"):
            games.append(GameEntry(path, trajectory["task_type"], int(trajectory["scene"]["scene_num"])))
    return games


def prove(player: Engine, prepared: PreparedGame, task_type: str, target: str, parent: str) -> list[str] | None:
    """The walkthrough that wins this game in the engine; None if there is none or the game is won at its start."""
    if player.load(prepared).won:
        return None
    try:
        plan = Oracle(player.facts.facts, prepared.entities).walkthrough(task_type, target, parent)
    except LookupError:
        return None
    for number, command in enumerate(plan, start=1):
        if player.step(command).won:
            return plan[:number]
    return None


def _make(recipe: GameRecipe, folder: Path, workers: int, log: Callable[[str], None]) -> None:
    """Draw here, without repeats; prove and write in the workers; draw again what could not be proven."""
    begun = time.monotonic()
    counts = {"train": recipe.train, "valid_seen": recipe.valid_seen, "valid_unseen": recipe.valid_unseen}
    for split in counts:
        (folder / split).mkdir(parents=True)
    total = sum(counts.values())
    made = 0
    keys = set[str]()
    draws: Counter[tuple[str, int]] = Counter()
    wanted = [(split, index) for split, count in counts.items() for index in range(count)]
    pool = ProcessPoolExecutor(
        min(workers, max(1, total // _CHUNK)), multiprocessing.get_context("spawn"), _begin_worker, (os.getpid(),)
    )

    with pool:
        while wanted:
            jobs = []
            for begin in range(0, len(wanted), _CHUNK):
                places = wanted[begin : begin + _CHUNK]
                drawn = [(split, _draw(recipe, split, index, draws, keys)) for split, index in places]
                jobs.append((places, pool.submit(_prove_and_write, folder, drawn)))

            wanted = []
            for places, job in jobs:
                proven = job.result()
                wanted += [place for place, ok in zip(places, proven, strict=True) if not ok]
                if made // 200 < (made + sum(proven)) // 200:
                    log(f"games: {made + sum(proven)}/{total} in {time.monotonic() - begun:.0f} s")
                made += sum(proven)
    log(f"games: {made} made and proven in {time.monotonic() - begun:.0f} s")


def _draw(recipe: GameRecipe, split: str, index: int, draws: Counter[tuple[str, int]], keys: set[str]) -> Problem:
    """A game that is unlike all in `keys`; the same for the same recipe, whatever the number of workers."""
    task_type = recipe.task_types[index % len(recipe.task_types)]
    choices = scenes_of(task_type, unseen=split == "valid_unseen")
    while draws[split, index] < _DRAWS:
        draws[split, index] += 1
        rng = random.Random(f"{recipe.seed} {split} {index} {draws[split, index]}")
        try:
            problem = draw_problem(task_type, rng.choice(choices), rng, recipe.max_receptacles, recipe.clutter)
        except Infeasible:
            continue
        if problem.key not in keys:
            keys.add(problem.key)
            return problem

    raise GamesError(
        f"no new {task_type} for {split} in {_DRAWS} draws: ask for fewer games, more clutter or more receptacles"
    )


@cache
def _rules() -> tuple[str, str]:
    """(domain, grammar) as the package ships them."""
    return Path(ALFRED_PDDL_PATH).read_text(), Path(ALFRED_TWL2_PATH).read_text()


@cache
def _player() -> Engine:
    return Engine()


def _begin_worker(parent: int) -> None:
    die_with_parent(parent)
    gc.set_threshold(50_000)  # the default looks through a translation again and again: a sixth of its time


def _prove_and_write(folder: Path, drawn: list[tuple[str, Problem]]) -> list[bool]:
    """To be called in a worker; returns which of these games were won, and so written."""
    return [_write_proven(folder / split, problem) for split, problem in drawn]


def _write_proven(folder: Path, problem: Problem) -> bool:
    domain, template = _rules()
    rules = template.replace("UNKNOWN GOAL", problem.goal_text)
    game = GameFile(folder, domain, rules, problem.pddl)
    try:
        prepared = PreparedGame(game, kept_translation(game))
    except GameError:
        return False
    plan = prove(_player(), prepared, problem.task_type, problem.target, problem.parent)
    if plan is None:
        return False

    trial = f"trial_{problem.key[:16]}"
    where = problem.parent or problem.toggle
    game_folder = folder / f"{problem.task_type}-{problem.target}-None-{where}-{problem.scene}" / trial
    game_folder.mkdir(parents=True)

    rules_of_game = {"pddl_domain": domain, "grammar": rules, "pddl_problem": problem.pddl}
    (game_folder / GAME_FILE).write_text(json.dumps({**rules_of_game, "solvable": True, "walkthrough": plan}))
    (game_folder / "initial_state.pddl").write_text(problem.pddl)

    sought = {"object_target": problem.target, "parent_target": problem.parent, "mrecep_target": ""}
    trajectory = {
        "task_id": trial,
        "task_type": problem.task_type,
        "pddl_params": {**sought, "toggle_target": problem.toggle, "object_sliced": False},
        "scene": {"floor_plan": f"FloorPlan{problem.scene}", "scene_num": problem.scene},
        "turk_annotations": {"anns": [{"task_desc": problem.goal_text, "high_descs": []}]},
    }
    (game_folder / TRAJECTORY_FILE).write_text(json.dumps(trajectory))
    return True


def _fingerprint_of(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / RECIPE_FILE).read_text())["fingerprint"])
    except (OSError, ValueError, KeyError):
        return None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.alfworld.games", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder; default: a cache by recipe")
    parser.add_argument("--workers", type=int, help="processes; default: one per core")
    parser.add_argument("--train", type=int)
    parser.add_argument("--seen", type=int, dest="valid_seen", help="held-out games in training scenes")
    parser.add_argument("--unseen", type=int, dest="valid_unseen")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--types", nargs="+", dest="task_types", choices=TASK_TYPES, metavar="TASK_TYPE")
    parser.add_argument("--max-receptacles", type=int)
    parser.add_argument("--clutter", type=int, nargs=2, metavar=("MIN", "MAX"))
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}

    try:
        folder = given.pop("out", None)
        workers = given.pop("workers", None)
        print(ensure_games(GameRecipe(**given), folder, workers))
    except ValueError as error:
        raise SystemExit(f"games: {error}") from None


if __name__ == "__main__":
    main()
