"""What a run makes of the cores that it has, and of more threads: seconds and CPU seconds of a training step.

    python -m experiments.bench cores [--task addition | long] [--steps 100] [--rounds 5] [--out FILE.json]

In each round `fresco run` trains the task of `bench compare` for so many steps in turn. It is pinned to one core, to
two and to four, as many as there are. On two it runs as well with two threads for the learner, for the engine, or for
both. The first steps, in which the run has not filled up, are left out. Beside the seconds stands which share of its
cores the run has used, and how many CPU seconds the learner and the generator with its engine need for a step.

An arm with more threads that needs more CPU seconds for the same step pays for the threads; one that is not sooner
either had no idle core to use.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.bench._measuring import Timing, in_turns, parser_of, write
from experiments.bench._processes import Watched, free_of_threads, watched
from experiments.bench._ratios import Idle, Ratio, provenance, ratio_of
from experiments.compare import fresco
from experiments.compare.job import Job
from experiments.compare.start_model import ensure_start_model
from experiments.compare.tasks import TASKS, job_of, most_steps

_LEFT_OUT = 10
_MORE = 4  # steps that the run would make, so that its end is not looked at
_LR = 3e-4
_BASE = "2 cores"
_LEARNER = "rl.learner.process"
_GENERATOR = "rollout.generator.process"


@dataclass(frozen=True)
class Arm:
    cores: int
    settings: tuple[str, ...] = ()


ARMS = {
    "1 core": Arm(1),
    _BASE: Arm(2),
    "4 cores": Arm(4),
    "learner.threads=2": Arm(2, ("learner.threads=2",)),
    "generator.threads=2": Arm(2, ("generator.threads=2",)),
    "both threads=2": Arm(2, ("learner.threads=2", "generator.threads=2")),
}


@dataclass(frozen=True)
class Spent:
    """What was spent for a training step, on average."""

    wall_s: float
    cpu_s: float
    learner_s: float
    """CPU seconds."""
    generator_s: float
    """CPU seconds of the generator, with its engine."""

    def share(self, cores: int) -> float:
        """The share of the cores that was used."""
        return self.cpu_s / (self.wall_s * cores)


def main(argv: list[str]) -> None:
    options = _options(argv)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < ARMS[_BASE].cores:
        raise SystemExit("bench cores: this process may use one core; it compares one with two")
    arms = {name: arm for name, arm in ARMS.items() if arm.cores <= len(cores)}
    found: dict[str, list[Spent]] = {name: [] for name in arms}
    ensure_start_model(TASKS[options.task])

    with Idle() as idle:
        for number, name in in_turns(arms, options.rounds):
            spent = _train(arms[name], cores, number, options)
            found[name].append(spent)
            print(f"round {number}, {name}: {spent.wall_s:.3f} s a step, {spent.cpu_s:.3f} CPU s", flush=True)

    write(options.out, _report(found, idle, options))


def _options(argv: list[str]) -> argparse.Namespace:
    parser = parser_of("cores", __doc__)
    parser.add_argument("--task", choices=sorted(TASKS), default="addition")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    most = most_steps(TASKS[options.task]) - _MORE
    if not _LEFT_OUT + 2 <= options.steps <= most:
        why = f"the first {_LEFT_OUT} are left out, and there are new questions for so many"
        parser.error(f"--steps {options.steps}: {_LEFT_OUT + 2} to {most}, because {why}")
    return options


def _train(arm: Arm, cores: Sequence[int], seed: int, options: argparse.Namespace) -> Spent:
    """Train one run, ended when it has made its steps. Raises SystemExit if it ends before."""
    task = TASKS[options.task]
    pinned = ["taskset", "-c", ",".join(map(str, cores[: arm.cores]))]

    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as folder:
        job = job_of(task, Path(folder) / "run", ensure_start_model(task), seed, lr=_LR, steps=options.steps + _MORE)
        command = [*pinned, *fresco.command(job, sys.executable), *arm.settings]

        with watched(command, job.folder.with_suffix(".log"), free_of_threads()) as watch:
            begin = _look(watch, job, _LEFT_OUT)
            end = _look(watch, job, options.steps)

    step_s = (end.row_s - begin.row_s) / (end.rows - begin.rows)
    between_s = end.elapsed_s - begin.elapsed_s
    used = zip(end.cpu_s, begin.cpu_s, strict=True)
    return Spent(step_s, *(step_s * (now - then) / between_s for now, then in used))


@dataclass(frozen=True)
class _Look:
    """The rows carry their own times; CPU seconds are of the moment of the look, which is later than the last row."""

    rows: int
    row_s: float
    """Unix time at the end of the last row."""
    elapsed_s: float
    cpu_s: tuple[float, float, float]
    """The CPU seconds of the run, of its learner and of its generator."""


def _look(watch: Watched, job: Job, least: int) -> _Look:
    """Look at the run, once it has made so many steps."""
    watch.until(lambda: len(fresco.rows(job)) >= least)
    rows = fresco.rows(job)
    watch.look()
    elapsed_s = watch.elapsed_s
    used = watch.used
    learner_s, generator_s = (
        sum(process.cpu_s for name, process in used.items() if part in name) for part in (_LEARNER, _GENERATOR)
    )
    return _Look(len(rows), rows[-1].time, elapsed_s, (watch.cpu_s, learner_s, generator_s))


def _report(found: dict[str, list[Spent]], idle: Idle, options: argparse.Namespace) -> dict[str, Any]:
    """Print the table; the same as a result."""
    titles = ("seconds a step", "CPU seconds", "share of its cores", "learner's CPU s", "generator's CPU s")
    table = Table("", *titles, "seconds over 2 cores", title=f"{options.task}: medians of {options.rounds} rounds")
    base = [Timing(spent.wall_s, spent.cpu_s) for spent in found[_BASE]]
    ratios: dict[str, Ratio] = {}
    medians: dict[str, dict[str, float]] = {}

    for name, spent in found.items():
        ratios[name] = ratio_of([Timing(each.wall_s, each.cpu_s) for each in spent], base)
        values = [
            (each.wall_s, each.cpu_s, each.share(ARMS[name].cores), each.learner_s, each.generator_s) for each in spent
        ]
        middle = [statistics.median(column) for column in zip(*values, strict=True)]
        medians[name] = dict(zip(titles, (round(value, 4) for value in middle), strict=True))
        wall = ratios[name].wall
        table.add_row(
            name, *(f"{value:.3f}" for value in middle), f"{wall.median:.2f} ({wall.low:.2f}–{wall.high:.2f})"
        )

    Console(highlight=False, width=140).print(table)
    print(idle.told(options.rounds))
    return {"task": options.task, "steps": options.steps, "medians": medians} | provenance(idle, ratios)
