"""The three tasks: the command that trains, what a step's metrics say of its score, and what is made before."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from envs.registry import make_family
from experiments.compare import fresco
from experiments.compare.start_model import ensure_start_model
from experiments.compare.tasks import HELD_OUT, TASKS, job_of
from launch.prepare import prepare
from launch.recipes import find_recipe
from rl.config.schema import Config, load_config

STEPS = 500
"""Of a run that is not ended by its time before; about as many as there are questions for."""

Metrics = Mapping[str, float]
"""A line of `metrics.jsonl` that belongs to a training step."""


@dataclass(frozen=True)
class Setup:
    command: list[str]
    """It trains, in the environment of this process."""
    tasks: int
    """Questions or games that can be drawn before one comes twice."""


class Task(Protocol):
    """Something to learn, with the same start model for every run of it."""

    @property
    def name(self) -> str: ...

    @property
    def seconds(self) -> float:
        """Of each run, from its command."""
        ...

    @property
    def goal(self) -> float:
        """The score to which the report counts the seconds of every arm."""
        ...

    @property
    def groups(self) -> int:
        """Questions or games in one training step."""
        ...

    @property
    def group_size(self) -> int:
        """Samples of each."""
        ...

    def set_up(self, folder: Path, seed: int) -> Setup:
        """Make what a run needs and is not there yet: it is no part of the run's seconds.

        The run itself makes `folder`; its parent is there, and belongs to this run alone.
        """
        ...

    def score(self, step: Metrics) -> float:
        """Share of the samples of this step that were right."""
        ...


@dataclass(frozen=True)
class Sums:
    """Two-digit addition, as it is compared with other trainers: `experiments.compare.tasks` says how they differ."""

    name: str
    seconds: float
    goal: float
    lr: float = 3e-4

    @property
    def groups(self) -> int:
        return TASKS[self.name].groups

    @property
    def group_size(self) -> int:
        return TASKS[self.name].group_size

    def set_up(self, folder: Path, seed: int) -> Setup:
        kind = TASKS[self.name]
        job = job_of(kind, folder, ensure_start_model(kind), seed, lr=self.lr, steps=STEPS)
        command = [*fresco.command(job, sys.executable), "generator.on_update=recompute"]  # arms differ in α alone
        return Setup(command, len(kind.questions(seed)) - HELD_OUT)

    def score(self, step: Metrics) -> float:
        """Nothing is filtered, and a right answer earns 1: the mean reward of the batch."""
        return step["rollout/reward"]


@dataclass(frozen=True)
class Games:
    """Household games: a recipe that filters constant groups, for a time instead of its number of steps.

    The recipe's learning rate falls to 0. Here it follows the time of training (`seconds`) and not the steps, so that
    at every second it is the same for every arm.
    """

    name: str
    recipe: str
    seconds: float
    goal: float
    changes: tuple[str, ...] = ()
    """Overrides of the recipe, for every run and for the start model."""

    @cached_property
    def config(self) -> Config:
        return load_config(find_recipe(self.recipe), list(self.changes))

    @property
    def groups(self) -> int:
        return self.config.rollout.groups_per_batch

    @property
    def group_size(self) -> int:
        return self.config.rollout.group_size

    def set_up(self, folder: Path, seed: int) -> Setup:
        """Games and the recipe's warm start, as the recipe itself makes and keeps them.

        A warm start depends on the run's seed. All runs begin with that of the recipe, named by its folder, so that a
        seed stands for another order of the games and other samples, and not for another start model.
        """
        config = self.config
        games = make_family(config).task_count("train")
        model = prepare(config).folder

        settings = {
            "name": folder.name,
            "runs": folder.parent,
            "seed": seed,
            "steps": STEPS,
            "seconds": self.seconds,
            "model.path": model,
            "model.warm_start.demonstrations": 0,
            "eval.tasks": 0,
            "tracking.wandb": "disabled",
            "tracking.live": "false",
        }

        overrides = [*self.changes, *(f"{key}={value}" for key, value in settings.items())]
        return Setup([sys.executable, "-m", "launch.cli", "run", self.recipe, *overrides], games)

    def score(self, step: Metrics) -> float:
        """Share of won games among the samples that were rolled out for the step, before the filter.

        `rollout/accuracy`, `rollout/reward` and `env/success_…` are means over the batch, that is over what the filter
        has left: groups that are partly won. They hardly move while a model goes from groups that are all lost to
        groups that are all won. `broker/filtered_groups` and `broker/filtered_successes` say how many whole groups
        were dropped since the batch before, and how many of their games were won. Each group is in one of the two, in
        one step. Groups that ended stale are in none: some of their games were cut, and the long ones are more often
        lost.
        """
        batch = self.groups * self.group_size
        won = step["rollout/accuracy"] * batch + step["broker/filtered_successes"]
        return won / (batch + step["broker/filtered_groups"] * self.group_size)


STUDY: dict[str, Task] = {
    "addition": Sums("addition", seconds=100, goal=0.8),
    "long": Sums("long", seconds=360, goal=0.4, lr=2e-4),
    "alfworld": Games("alfworld", "alfworld_small", seconds=300, goal=0.5),
}
