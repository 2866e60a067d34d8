"""One run of the study: what is started, how long it lasts, and what is kept of it."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from experiments.bench._processes import watched
from experiments.bench._ratios import Idle, machine
from experiments.compare import fresco
from experiments.compare.job import Job, Row
from experiments.compare.start_model import ensure_start_model
from experiments.compare.tasks import TASKS, questions

RESULTS = Path(__file__).parents[1] / "results" / "time_to_score"
ARMS = ("sync", "0.5", "1", "2", "4")
SEEDS = (0, 1, 2)
_LOOK_S = 0.2
_STEPS = 500  # more than any run reaches


@dataclass(frozen=True)
class Task:
    name: str
    seconds: float
    """Of each run, from its command."""
    lr: float


STUDY = {task.name: task for task in (Task("addition", 100, 1e-4), Task("long", 360, 1e-4))}


@dataclass(frozen=True)
class Run:
    """A finished run. The n-th entry of each list is of the n-th training step."""

    task: str
    arm: str
    seed: int
    seconds: list[float]
    """When it had been trained, since the command."""
    scores: list[float]
    """Share of right answers among its samples."""
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
    """Train for the task's seconds. Raises SystemExit if training ends before."""
    kind = TASKS[task.name]
    model = ensure_start_model(kind)

    with tempfile.TemporaryDirectory(prefix="fresco-study-") as name:
        folder = Path(name)
        lines = [json.dumps({"question": question, "answer": answer}) for question, answer in questions(seed)]
        (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")

        job = Job(
            folder=folder / "run",
            model=model,
            questions=folder / "questions.jsonl",
            seed=seed,
            lr=task.lr,
            steps=_STEPS,
            groups=kind.groups,
            group_size=kind.group_size,
            max_tokens=kind.max_tokens,
            rows_at_once=kind.rows_at_once,
        )

        with Idle() as idle:
            rows, origin, cpu_s = _watch(job, overrides(arm), task.seconds)

    batch = kind.groups * kind.group_size
    return Run(
        task=task.name,
        arm=arm,
        seed=seed,
        seconds=[round(row.time - origin, 3) for row in rows],
        scores=[round(row.accuracy, 6) for row in rows],
        samples=[batch * number for number in range(1, len(rows) + 1)],
        cpu_s=round(cpu_s, 1),
        others=round(idle.others, 3),
        machine=machine(),
    )


def _watch(job: Job, more: Sequence[str], seconds: float) -> tuple[list[Row], float, float]:
    """The rows of the time, when the command was given, and the CPU seconds of all its processes."""
    settings = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")  # the run decides
    environment = {name: value for name, value in os.environ.items() if name not in settings}
    output = job.folder.with_suffix(".log")

    with watched([*fresco.command(job, sys.executable), *more], output, environment) as watch:
        while watch.running and watch.elapsed_s < seconds:
            time.sleep(_LOOK_S)

        rows = [row for row in fresco.rows(job) if row.time - watch.origin <= seconds]
        if not watch.running and len(rows) < job.steps:
            raise SystemExit(f"it ended after {len(rows)} steps:\n{output.read_text(errors='replace')[-4000:]}")
        return rows, watch.origin, watch.cpu_s


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
