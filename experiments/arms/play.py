"""One run of a study: what is started, how long it lasts, and what is kept of it."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.registry import make_family
from experiments.arms.measures import ALL
from experiments.arms.records import Record, Won
from experiments.arms.study import BEFORE_FILTER, START, Cell, Study, StudyError
from experiments.bench._processes import free_of_threads, watched
from experiments.bench._ratios import Idle, machine
from experiments.compare import fresco
from experiments.compare.job import read_lines
from experiments.compare.start_model import ensure_start_model
from experiments.compare.tasks import TASKS, job_of, most_steps
from launch.prepare import prepare
from rl.config.schema import Config
from rl.store.checkpoint_folder import latest
from rl.wire.run import RunFile

Metrics = Mapping[str, float]
"""A line of `metrics.jsonl` that belongs to a training step."""


def play(study: Study, cell: Cell, runs: Path) -> Record:
    """Raises StudyError for a run that is too short for a score, SystemExit for one that fails."""
    record = _plain(study, cell) if study.loop == "plain" else _system(study, cell, runs)
    record.made_by = study.made_by(cell)
    record.machine, record.date = machine(), time.strftime("%Y-%m-%d")
    return record


def _system(study: Study, cell: Cell, runs: Path) -> Record:
    """`fresco run`, in a folder of its own below `runs`."""
    runs.mkdir(parents=True, exist_ok=True)
    folder = runs.absolute() / str(cell).replace(", ", ".").replace(" ", "-")
    changes = [*_given(study, cell, folder), *study.changes_of(cell.arm), *_ends(study, cell, folder)]
    recipe = study.recipe_of(cell.arm)
    command = [sys.executable, "-m", "launch.cli", "run", str(recipe), *changes]

    began = time.monotonic()
    with Idle() as idle:
        rows, origin, cpu_s = _watch(command, folder, None if cell.how else study.seconds)
    config = RunFile.load(folder).config
    record = Record(arm=cell.arm, seed=cell.seed, how=cell.how, cpu_s=round(cpu_s, 1), others=round(idle.others, 3))
    record.wall_s = round(time.monotonic() - began, 1)

    if cell.how:
        record.won = read_evaluation(folder, config)
        return record
    tasks = make_family(config).task_count("train") if study.fresh else None
    _add_steps(record, study, config, rows, origin, tasks)
    record.facts |= _summary(folder)
    return record


def _given(study: Study, cell: Cell, folder: Path) -> list[str]:
    """What stands before the study's own changes: its task, or where it begins."""
    if study.task:
        kind = TASKS[study.task]
        steps = most_steps(kind)
        job = job_of(kind, folder, ensure_start_model(kind), cell.seed, lr=3e-4, steps=steps)
        return fresco.settings(job)
    if study.same_start:
        model = prepare(study.config_of(START)).folder
        return [f"model.path={model}", "model.warm_start.demonstrations=0"]
    return [f"model.warm_start.seed={cell.seed}"]


def _ends(study: Study, cell: Cell, folder: Path) -> list[str]:
    """What no recipe decides: folder, seed, and whether the run trains or evaluates."""
    found = [f"runs={folder.parent}", f"name={folder.name}", f"seed={cell.seed}", "tracking.wandb=disabled"]
    if not cell.how:
        return [*found, "eval.tasks=0"] if study.evaluate else found

    found += ["steps=0", *study.evaluate[cell.how]]
    if cell.arm != START:
        trained = folder.with_name(folder.name.removesuffix(f".{cell.how}"))
        checkpoint = latest(trained / "checkpoints")
        if checkpoint is None:
            raise StudyError(f"{trained} has no checkpoint to evaluate: name its folder with --runs, or train it again")
        found.append(f"resume={checkpoint}")
    return found


def _watch(command: Sequence[str], folder: Path, seconds: float | None) -> tuple[list[Metrics], float, float]:
    """The training steps of the time, when the command was given, and the CPU seconds of all its processes."""
    output = folder.with_suffix(".log")
    environment = free_of_threads() if seconds is not None else os.environ

    with watched(command, output, environment) as watch:
        watch.until(lambda: not watch.running or watch.elapsed_s >= (seconds or math.inf))
        if not watch.running:
            watch.finish()

        rows: list[Metrics] = [*read_lines(folder / "metrics.jsonl")]
        within = math.inf if seconds is None else seconds
        return [row for row in rows if row["time"] - watch.origin <= within], watch.origin, watch.cpu_s


def _add_steps(
    record: Record, study: Study, config: Config, rows: Sequence[Metrics], origin: float, tasks: int | None
) -> None:
    """Scores by step. With a number of tasks, steps that may have drawn one of them twice are left out."""
    batch = config.rollout.groups_per_batch * config.rollout.group_size
    trained = [row for row in rows if "train/loss" in row]
    if tasks is not None:
        new = [drawn(config, trained[:number]) <= tasks for number in range(1, len(trained) + 1)]
        trained = trained[: [*new, False].index(False)]
    if len(trained) < study.window and "score" in study.read:
        raise StudyError(
            f"{len(trained)} steps on new tasks of {tasks}: a score is the mean of {study.window}; "
            "give the study more seconds, or its recipe more tasks"
        )

    held_out = study.score.startswith("eval/")
    scored = [row for row in rows if study.score in row] if held_out else trained
    record.seconds = [round(row["time"] - origin, 3) for row in scored]
    record.scores = [round(score_of(study, config, row), 6) for row in scored]
    record.samples = [batch * (int(row["step"]) if held_out else number) for number, row in enumerate(scored, 1)]
    record.accuracy = {str(int(r["step"])): round(r["eval/accuracy"], 4) for r in rows if "eval/accuracy" in r}
    record.facts |= means_of(study, trained)


def means_of(study: Study, trained: Sequence[Metrics]) -> dict[str, float]:
    """The mean of each metric that the study names, after the first quarter of training."""
    late = trained[len(trained) // 4 :]
    return {name: statistics.fmean(row[metric] for row in late) for name, metric in study.means.items()}


def score_of(study: Study, config: Config, row: Metrics) -> float:
    """Share of right or won samples of one step.

    Before the filter: `rollout/accuracy` is of the batch, that is of what the filter has left, groups that are partly
    won. It hardly moves while a model goes from groups that are all lost to groups that are all won. The broker's
    metrics say how many whole groups were dropped since the batch before, and how many of their samples were won.
    """
    if study.score != BEFORE_FILTER:
        return row[study.score]
    batch = config.rollout.groups_per_batch * config.rollout.group_size
    won = row["rollout/accuracy"] * batch + row["broker/filtered_successes"]
    return won / (batch + row["broker/filtered_groups"] * config.rollout.group_size)


def drawn(config: Config, steps: Sequence[Metrics]) -> int:
    """Tasks drawn until the last of these steps was assembled, at most: a group that was cut off draws no new one.

    Of every state of the ledger, except that the batches of the steps before are counted whether they are trained or
    still to be trained.
    """
    last = steps[-1]
    trained = config.rollout.groups_per_batch * config.rollout.group_size * (len(steps) - 1)
    others = sum(
        value
        for name, value in last.items()
        if name.startswith("queue/") or (name.startswith("broker/") and name.endswith("_samples"))
    )
    return math.ceil((trained + others) / config.rollout.group_size)


def _summary(folder: Path) -> dict[str, float]:
    """Facts of a run that has ended by itself."""
    path = folder / "summary.json"
    if not path.exists():
        return {}
    summary: dict[str, Any] = json.loads(path.read_text())
    return {
        "steps": summary["steps"],
        "violations": summary["freshness_violations"],
        "staleness": summary["staleness"]["mean"],
        "useful_share": summary["broker"]["useful_share"],
        "tokens": summary["ledger"]["tokens"]["trained"],
    }


def read_evaluation(folder: Path, config: Config) -> Won:
    """Which tasks of each kind were won, from the folder of an evaluation."""
    answered = {row["task_index"]: row for row in read_lines(folder / "evals.jsonl")}
    family = make_family(config)
    won: Won = {}

    for task in range(config.eval.tasks):
        kind = str(getattr(family.task("eval", task), "task_type", ALL))
        won[kind] = won.get(kind, "") + (str(int(answered[task]["success"])) if task in answered else "-")
    return won


def _plain(study: Study, cell: Cell) -> Record:
    """The same arm in one process (`experiments/plain_loop.py`). A gradient that is not finite is a result."""
    import torch

    from experiments.plain_loop import PlainLoop, model_folder, run

    config = study.config_of(cell.arm, [f"seed={cell.seed}"])
    torch.set_num_threads(config.learner.threads)
    began = time.process_time()
    rows: list[dict[str, float]] = []
    ended = ""
    try:
        for row in run(PlainLoop(config, model_folder(config)), study.every_arm[cell.arm].lag):
            rows.append(row)
    except FloatingPointError as error:
        ended = f"step {len(rows)}: {error}"

    trained = [row for row in rows if "reward/mean" in row]
    return Record(
        arm=cell.arm,
        seed=cell.seed,
        ended=ended,
        cpu_s=round(time.process_time() - began, 1),
        scores=[round(row["reward/mean"], 6) for row in trained],
        accuracy={str(int(row["step"])): round(row["eval/greedy"], 4) for row in rows if "eval/greedy" in row},
        facts=means_of(study, trained) if trained else {},
    )
