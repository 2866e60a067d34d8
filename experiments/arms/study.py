"""What a study says: recipe, arms, seeds, evaluations, and the columns of its table."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from experiments.compare.fresco import RECIPE
from rl.config.recipes import find_recipe
from rl.config.schema import Config, load_config
from rl.store.made_once import digest

START = "start"
"""The arm of a model that is evaluated before anything is trained."""
BEFORE_FILTER = "before_filter"
"""The score of a recipe that drops groups of equal rewards: successes among all that were rolled out."""
_OF_START = {"model", "sampling", "env", "generator"}
_NOT_OF_A_RUN = {"name", "runs", "resume", "eval", "tracking", "alarms"}
"""A study sets these itself, or they change no result."""


class StudyError(ValueError):
    """One line that says what is wrong and what to do."""


class Arm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an arm differs from the study's recipe."""

    set: list[str] = []
    recipe: str = ""
    """The recipe of this arm instead of the study's."""
    lag: int = 0
    """Versions between sampling and training, in one process (`loop: plain`)."""


class Cell(msgspec.Struct, frozen=True):
    """One run. `how` names an evaluation; it is empty for the training run."""

    arm: str
    seed: int
    how: str = ""

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}" + (f", {self.how}" if self.how else "")


class Study(msgspec.Struct, forbid_unknown_fields=True):
    """One file of `experiments/studies/`."""

    title: str
    read: list[str]
    """Columns of the table of arms: a name of `measures.COLUMNS`, of `means`, or of the facts of a run's summary."""
    about: str = ""
    recipe: str = ""
    task: str = ""
    """A task of `experiments/compare/tasks.py`, with its start model and questions, in place of a recipe."""
    loop: Literal["system", "plain"] = "system"
    set: list[str] = []
    """Overrides of every run."""
    arms: dict[str, list[str] | Arm] = {}
    grid: dict[str, list[int | float | str]] = {}
    """Arms as a product: values of fields, or of `lag`."""
    seeds: tuple[int, ...] = (0,)
    baseline: str = ""
    """The arm that others are compared with, seed by seed."""
    seconds: float | None = None
    """A run is ended so long after its command; without it, it ends by itself."""
    same_start: bool = False
    """Every seed begins with the recipe's own start model; else each makes its own warm start."""
    fresh: bool = False
    """Steps that may have drawn a task twice are left out."""
    score: str = "rollout/reward"
    """The metric of a training step that is its score, or `before_filter`; or one of its evaluations, `eval/…`."""
    window: int = 5
    """Steps over which a score is averaged; of accuracies, how many last evaluations."""
    goal: float = 0.0
    """A score to which the seconds are counted."""
    evaluate: dict[str, list[str]] = {}
    """The evaluations by name: overrides of an evaluation of the start model and of each arm's last checkpoint."""
    means: dict[str, str] = {}
    """The metrics, by name, whose means after the first quarter of training are kept."""

    @property
    def every_arm(self) -> dict[str, Arm]:
        """The arms that are written down, then those of the grid."""
        found = {name: arm if isinstance(arm, Arm) else Arm(arm) for name, arm in self.arms.items()}
        for values in itertools.product(*self.grid.values()) if self.grid else ():
            chosen = dict(zip(self.grid, values, strict=True))
            name = ", ".join(f"{key.split('.')[-1]} {value}" for key, value in chosen.items())
            lag = int(chosen.pop("lag", 0))
            found[name] = Arm([f"{key}={value}" for key, value in chosen.items()], lag=lag)
        return found

    def recipe_of(self, arm: str) -> Path:
        """The recipe of an arm, or of the start model."""
        other = self.every_arm[arm].recipe if arm != START else ""
        return find_recipe(other or self.recipe or RECIPE)

    def changes_of(self, arm: str) -> list[str]:
        """What the study and the arm set."""
        return [*self.set, *(self.every_arm[arm].set if arm != START else [])]

    def config_of(self, arm: str, more: Sequence[str] = ()) -> Config:
        """Raises ConfigError."""
        return load_config(self.recipe_of(arm), [*self.changes_of(arm), *more])

    def made_by(self, cell: Cell) -> str:
        """A digest of what recipe, study and arm choose for a run; of a start model, only what it depends on.

        Fields with their default are left out, so that a field that is new to Fresco refuses no older run.
        """
        chosen: dict[str, Any] = self.config_of(cell.arm).model_dump(mode="json", exclude_defaults=True)
        left_out = chosen.keys() - _OF_START if cell.arm == START else _NOT_OF_A_RUN
        kept = {key: chosen[key] for key in sorted(chosen.keys() - left_out)}
        if cell.arm == START:
            return digest(json.dumps([kept, self.task]))
        return digest(json.dumps([kept, self.task, self.loop, self.seconds, self.score, self.every_arm[cell.arm].lag]))

    def cells(self) -> list[Cell]:
        """All runs in the order in which they are made: a seed of every arm before the next seed."""
        made = []
        for seed in self.seeds:
            made += [Cell(START, seed, how) for how in self.evaluate]
            for arm in self.every_arm:
                made += [Cell(arm, seed), *(Cell(arm, seed, how) for how in self.evaluate)]
        return made


def load(path: Path) -> Study:
    """Raises StudyError for a file that is no study."""
    try:
        study = msgspec.convert(yaml.safe_load(path.read_text()), Study)
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise StudyError(f"{path}: {error}") from None

    if bool(study.recipe) == bool(study.task):
        raise StudyError(f"{path}: set recipe or task, one of both")
    if not study.every_arm:
        raise StudyError(f"{path}: without an arm there is nothing to compare; write arms or grid")
    if study.baseline and study.baseline not in study.every_arm:
        raise StudyError(f"{path}: baseline={study.baseline!r} is no arm; arms are {', '.join(study.every_arm)}")
    return study
