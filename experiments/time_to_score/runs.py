"""One run of the study: what is started, how long it lasts, and what is kept of it."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.bench._processes import free_of_threads, watched
from experiments.bench._ratios import Idle, machine
from experiments.compare.job import read_lines
from experiments.time_to_score.tasks import STEPS, Metrics, Task

RESULTS = Path(__file__).parents[1] / "results" / "time_to_score"
ARMS = ("sync", "0.5", "1", "2", "4")
SEEDS = (0, 1, 2)
WINDOW = 5
"""Steps over which a score is averaged: one step's samples sway by several points."""
_LOOK_S = 0.2


@dataclass(frozen=True)
class Run:
    """A finished run. The n-th entry of each list is of the n-th training step."""

    task: str
    arm: str
    seed: int
    seconds: list[float]
    """When it had been trained, since the command."""
    scores: list[float]
    """Share of right ones among the samples of the step (`Task.score`)."""
    samples: list[int]
    """Trained so far."""
    cpu_s: float
    others: float
    """Share of the machine that others used meanwhile."""
    machine: str

    @property
    def key(self) -> tuple[str, str, int]:
        return self.task, self.arm, self.seed


def overrides(arm: str) -> list[str]:
    """What tells the arms apart. Alternating phases have the machine to themselves, so each may use two cores."""
    if arm == "sync":
        return ["rollout.alpha=0", "generator.threads=2", "learner.threads=2"]
    return [f"rollout.alpha={arm}"]


def play(task: Task, arm: str, seed: int) -> Run:
    """Train for the task's seconds; steps that may have drawn something twice are left out.

    Raises SystemExit if training ends before its time and its last step, or has too few steps for a score.
    """
    with tempfile.TemporaryDirectory(prefix="fresco-study-") as name:
        folder = Path(name) / "run"
        setup = task.set_up(folder, seed)

        with Idle() as idle:
            trained, origin, cpu_s = _watch([*setup.command, *overrides(arm)], folder, task.seconds)

    new = [drawn(task, trained[:number]) <= setup.tasks for number in range(1, len(trained) + 1)]
    steps = trained[: [*new, False].index(False)]
    if len(steps) < WINDOW:
        raise SystemExit(
            f"{len(trained)} steps in {task.seconds:g} s, {len(steps)} of them on new ones of {setup.tasks} training "
            f"tasks: a score is the mean of {WINDOW}"
        )

    return Run(
        task=task.name,
        arm=arm,
        seed=seed,
        seconds=[round(step["time"] - origin, 3) for step in steps],
        scores=[round(task.score(step), 6) for step in steps],
        samples=[batch_size(task) * number for number in range(1, len(steps) + 1)],
        cpu_s=round(cpu_s, 1),
        others=round(idle.others, 3),
        machine=machine(),
    )


def batch_size(task: Task) -> int:
    """Samples that one step trains."""
    return task.groups * task.group_size


def drawn(task: Task, steps: Sequence[Metrics]) -> int:
    """Tasks drawn until the last of these steps was assembled, at most: a group that was cut off draws no new one.

    Of every state of the ledger, except that the batches of the steps before are counted whether they are trained or
    still to be trained.
    """
    last = steps[-1]
    trained = batch_size(task) * (len(steps) - 1)
    others = sum(
        value
        for name, value in last.items()
        if name.startswith("queue/") or (name.startswith("broker/") and name.endswith("_samples"))
    )
    return math.ceil((trained + others) / task.group_size)


def _watch(command: Sequence[str], folder: Path, seconds: float) -> tuple[list[Metrics], float, float]:
    """The training steps of the time, when the command was given, and the CPU seconds of all its processes."""
    output = folder.with_suffix(".log")

    with watched(command, output, free_of_threads()) as watch:
        while watch.running and watch.elapsed_s < seconds:
            time.sleep(_LOOK_S)

        lines: list[Metrics] = [*read_lines(folder / "metrics.jsonl")]
        steps = [line for line in lines if "train/loss" in line and line["time"] - watch.origin <= seconds]
        if not watch.running and len(steps) < STEPS:
            raise SystemExit(f"it ended after {len(steps)} steps:\n{output.read_text(errors='replace')[-4000:]}")
        return steps, watch.origin, watch.cpu_s


def read(folder: Path = RESULTS) -> list[Run]:
    """All finished runs, by task, arm and seed."""
    runs = [
        Run(**json.loads(line)) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()
    ]
    return sorted(runs, key=lambda run: (run.task, ARMS.index(run.arm), run.seed))


def append(run: Run, folder: Path = RESULTS) -> None:
    """One line at the end of its task's file, which is made with its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{run.task}.jsonl").open("a") as file:
        file.write(json.dumps(asdict(run)) + "\n")
