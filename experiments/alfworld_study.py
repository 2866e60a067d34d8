"""The ALFWorld table: unseen games before and after RL, sampled and greedy, beside two controls, for several seeds.

    python -m experiments.alfworld_study [--seeds 0 1 2] [--arms recipe entropy synchronous] [--table] [key=value ...]

Every cell is a file of its own in `experiments/results/alfworld/`, and is not made again where it is there, so that the
study can be interrupted and go on another day; `README.md` there is the table of the cells that are there, and says
which are missing (`--table` makes it without a run). A cell is a training run without evaluation (`seed-0.recipe.json`)
or 1 024 unseen games of its last checkpoint, at temperature 1 or greedily (`seed-0.recipe.greedy.json`); those of the
warm start (`seed-0.warm.greedy.json`) are shared by all arms of a seed. Checkpoints stay in `--runs`. A cell says on
which machine and by which recipe it was made, and one of a recipe that chooses otherwise is refused.

The controls differ from the recipe in one thing each. `entropy`: all rewards are 0 when advantages are computed, so
that the loss is the entropy charge alone; groups are filtered by what they really earned, as in the recipe.
`synchronous`: alpha = 0, rollout and training one after the other, for the same seconds. The exit code is 0 if every
seed has gained 15 points at temperature 1 and its interval lies above 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from envs.registry import make_family
from experiments.before_after import ALL, RESULTS, timed_run
from experiments.bench._ratios import machine
from launch.intervals import paired_bootstrap, wilson
from launch.recipes import find_recipe
from rl.config.schema import load_config
from rl.store.checkpoint_folder import latest
from rl.store.made_once import digest
from rl.wire.run import RunFile

WARM = "warm"
ARMS = {
    "recipe": (),
    "entropy": ("algo.shaping=[{name: affine, options: {scale: 0}}]",),
    "synchronous": ("rollout.alpha=0",),
}
TEMPERATURES = {"sampled": 1.0, "greedy": 0.0}
GOAL = 0.15
_OF_WARM = {"model", "sampling", "env", "generator"}
_NOT_OF_A_CELL = {"name", "runs", "resume", "eval", "tracking", "alarms"}
"""What a study sets itself, or what changes no result."""

Won = dict[str, str]
"""By task type, in the order of the tasks: 1 won, 0 lost, - not answered."""


class StudyError(RuntimeError):
    """One line: what is wrong, and what to do."""


@dataclass(frozen=True)
class Cell:
    """`how`: a name of TEMPERATURES; empty: the training run."""

    seed: int
    arm: str
    how: str = ""

    @property
    def name(self) -> str:
        return f"seed-{self.seed}.{self.arm}" + (f".{self.how}" if self.how else "")


@dataclass(frozen=True)
class Study:
    recipe: Path
    results: Path
    runs: Path
    episodes: int
    overrides: tuple[str, ...] = ()

    def file(self, cell: Cell) -> Path:
        return self.results / f"{cell.name}.json"

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """None if it is not there. Raises StudyError if another recipe made it."""
        path = self.file(cell)
        if not path.exists():
            return None

        found: dict[str, Any] = json.loads(path.read_text())
        if found.get("recipe") != self.made_by(cell):
            raise StudyError(f"{path} was made by another recipe, or with other overrides: remove it to make it again")
        return found

    def made_by(self, cell: Cell) -> str:
        """A digest of what the recipe and the overrides choose, and of the warm start's part of it for that.

        Fields that have their default are left out, so that a field that is new to Fresco refuses no older cell. A
        default that changes is a change of Fresco, of which a cell says nothing.
        """
        config = load_config(self.recipe, [*ARMS.get(cell.arm, ()), *self.overrides])
        chosen = config.model_dump(mode="json", exclude_defaults=True)
        left_out = chosen.keys() - _OF_WARM if cell.arm == WARM else _NOT_OF_A_CELL
        return digest(json.dumps({key: chosen[key] for key in sorted(chosen.keys() - left_out)}))

    def won(self, cell: Cell) -> Won | None:
        found = self.read(cell)
        return None if found is None else found["won"]

    def play(self, cell: Cell) -> dict[str, Any]:
        """One run. Raises RuntimeError when it does not finish, StudyError without a checkpoint to evaluate."""
        settings = [f"seed={cell.seed}", f"model.warm_start.seed={cell.seed}", f"runs={self.runs}", f"name={cell.name}"]
        if not cell.how:
            settings += [*ARMS[cell.arm], "eval.tasks=0"]
        else:
            temperature = TEMPERATURES[cell.how]
            settings += ["steps=0", f"eval.tasks={self.episodes}", f"eval.temperature={temperature}"]
            if cell.arm != WARM:
                settings.append(f"resume={self._checkpoint(replace(cell, how=''))}")

        took = timed_run(self.recipe, [*settings, *self.overrides])
        read = read_evaluation if cell.how else read_training
        return read(self.runs / cell.name) | took | {"recipe": self.made_by(cell), "machine": machine()}

    def _checkpoint(self, trained: Cell) -> Path:
        checkpoint = latest(self.runs / trained.name / "checkpoints")
        if checkpoint is None:
            again = f"remove {self.file(trained)} to train it again, or name its folder with --runs"
            raise StudyError(f"{self.runs / trained.name} has no checkpoint: {again}")
        return checkpoint


def cells(seeds: Sequence[int], arms: Sequence[str]) -> list[Cell]:
    """In the order in which they are made: what a seed begins with, then each arm with its evaluations."""
    made = []
    for seed in seeds:
        made += [Cell(seed, WARM, how) for how in TEMPERATURES]
        for arm in arms:
            made += [Cell(seed, arm), *(Cell(seed, arm, how) for how in TEMPERATURES)]
    return made


def read_training(folder: Path) -> dict[str, Any]:
    """What a training run did, from its folder."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    over = max((row["time/over"] for row in rows if "time/over" in row), default=0.0)
    seconds = RunFile.load(folder).config.seconds

    return {
        "steps": summary["steps"],
        "training_s": None if seconds is None else round(over * seconds, 1),
        "trained": {unit: summary["ledger"][unit]["trained"] for unit in ("samples", "tokens")},
        "useful_share": summary["broker"]["useful_share"],
        "staleness": summary["staleness"]["mean"],
        "freshness_violations": summary["freshness_violations"],
    }


def read_evaluation(folder: Path) -> dict[str, Any]:
    """Which tasks of each type were won, from the folder of an evaluation."""
    config = RunFile.load(folder).config
    rows = [msgspec.json.decode(line) for line in (folder / "evals.jsonl").read_bytes().splitlines()]
    answered = {row["task_index"]: row for row in rows}
    family = make_family(config)
    won: dict[str, str] = {}

    for task in range(config.eval.tasks):
        kind = str(getattr(family.task("eval", task), "task_type", ALL))
        won[kind] = won.get(kind, "") + (str(int(answered[task]["success"])) if task in answered else "-")
    turns = sum(row["turns"] for row in rows) / len(rows)
    return {"temperature": config.eval.temperature, "turns": round(turns, 2), "won": won}


# ---------------------------------------------------------------- the table


def pairs(before: Won, after: Won, kind: str) -> tuple[list[float], list[float]]:
    """Of the tasks that both have answered, of one type or of ALL."""
    kinds = before if kind == ALL else [kind]
    both = [(x, y) for each in kinds for x, y in zip(before[each], after[each], strict=True) if "-" not in (x, y)]
    return [float(x) for x, _ in both], [float(y) for _, y in both]


def gained(study: Study, seed: int, arm: str, how: str, kind: str = ALL) -> tuple[float, float, float] | None:
    """(mean, low, high) of the paired gain; None while a cell is missing."""
    before = study.won(Cell(seed, WARM, how))
    after = study.won(Cell(seed, arm, how))
    return None if before is None or after is None else paired_bootstrap(*pairs(before, after, kind))


def reached(study: Study, seed: int) -> bool:
    """At least 15 points more at temperature 1, the interval above 0."""
    gain = gained(study, seed, "recipe", "sampled")
    return gain is not None and gain[0] >= GOAL and gain[1] > 0


_NOT_OFFICIAL = (
    "These are not the official games but games made offline, of all six task types. Goals are templates without the "
    "annotations that people wrote; objects are drawn into the package's floor plans (19 receptacles in the median); "
    "30 turns are allowed; unseen are 24 floor plans, while words, kinds of rooms and most goals are those of training "
    "([how they differ](../../../docs/alfworld.md#how-these-games-differ-from-the-official-ones))."
)


def page(study: Study, seeds: Sequence[int], arms: Sequence[str]) -> str:
    """Markdown: all games, the recipe beside its controls, what training was, and each type of task."""
    missing = [f"`{cell.name}`" for cell in cells(seeds, arms) if not study.file(cell).exists()]
    parts = [
        f"# {study.recipe.stem}: unseen games before and after RL",
        "`python -m experiments.alfworld_study`. Intervals are of 95 %: Wilson's for a share, a bootstrap over games "
        "for a difference, which is paired by game.",
        f"Cells that are missing: {', '.join(missing)}." if missing else "No cell is missing.",
        _NOT_OFFICIAL,
        "## All games",
        _table(_gain_rows(study, seeds, arms, [ALL]), "warm start", "after RL"),
        "## Recipe against controls",
        _table(_control_rows(study, seeds, arms), "after the control", "after the recipe"),
        "## Training",
        _training(study, seeds, arms),
        "## By type of task",
        _table(_gain_rows(study, seeds, arms, None), "warm start", "after RL"),
    ]
    return "\n\n".join(parts) + "\n"


Row = tuple[int, str, str, str, Won, Won]


def _gain_rows(study: Study, seeds: Sequence[int], arms: Sequence[str], kinds: Sequence[str] | None) -> list[Row]:
    rows: list[Row] = []
    for how in TEMPERATURES:
        for arm in arms:
            for seed in seeds:
                before = study.won(Cell(seed, WARM, how))
                after = study.won(Cell(seed, arm, how))
                if before is not None and after is not None:
                    rows += [(seed, arm, how, kind, before, after) for kind in kinds or sorted(before)]
    return rows


def _control_rows(study: Study, seeds: Sequence[int], arms: Sequence[str]) -> list[Row]:
    rows: list[Row] = []
    for how in TEMPERATURES:
        for arm in (each for each in arms if each != "recipe"):
            for seed in seeds:
                control = study.won(Cell(seed, arm, how))
                recipe = study.won(Cell(seed, "recipe", how))
                if control is not None and recipe is not None:
                    rows.append((seed, arm, how, ALL, control, recipe))
    return rows


def _table(rows: Sequence[Row], first: str, second: str) -> str:
    lines = [
        f"| play | arm | seed | tasks | games | {first} | {second} | difference (95 % interval) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for seed, arm, how, kind, before, after in rows:
        both = pairs(before, after, kind)
        mean, low, high = (100 * value for value in paired_bootstrap(*both))
        shares = " | ".join(_share(values) for values in both)
        difference = f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
        lines.append(f"| {how} | {arm} | {seed} | {kind} | {len(both[0])} | {shares} | {difference} |")
    return "\n".join(lines)


def _training(study: Study, seeds: Sequence[int], arms: Sequence[str]) -> str:
    lines = [
        "| arm | seed | seconds of training | steps | samples | tokens | share of tokens that train | mean staleness | "
        "minutes with the start | CPU minutes | load of the machine | machine |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]

    for arm in arms:
        for seed in seeds:
            if (found := study.read(Cell(seed, arm))) is not None:
                trained = f"{found['trained']['samples']} | {found['trained']['tokens']} | {found['useful_share']:.2f}"
                took = f"{found['wall_s'] / 60:.1f} | {found['cpu_s'] / 60:.1f} | {found['load']:.1f}"
                facts = f"{found['training_s']} | {found['steps']} | {trained} | {found['staleness']:.2f} | {took}"
                lines.append(f"| {arm} | {seed} | {facts} | {found['machine']} |")
    return "\n".join(lines)


def _share(values: Sequence[float]) -> str:
    low, high = wilson(sum(values), len(values))
    return f"{100 * sum(values) / len(values):.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--recipe", default="alfworld_cpu")
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "alfworld_study", help="checkpoints, which stay")
    parser.add_argument("--results", type=Path, default=RESULTS / "alfworld")
    parser.add_argument("--table", action="store_true", help="of the cells that are there; no run")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)

    recipe = find_recipe(arguments.recipe)
    study = Study(recipe, arguments.results, arguments.runs, arguments.episodes, tuple(arguments.overrides))
    study.results.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        (study.results / "README.md").write_text(page(study, arguments.seeds, arguments.arms))

    for cell in cells(arguments.seeds, arguments.arms):
        if not arguments.table and not study.file(cell).exists():
            print(f"cell {cell.name}", flush=True)
            study.file(cell).write_text(json.dumps(study.play(cell)) + "\n")
            write()

    write()
    print(page(study, arguments.seeds, arguments.arms))
    return 0 if all(reached(study, seed) for seed in arguments.seeds) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except StudyError as error:
        sys.exit(f"alfworld_study: {error}")
