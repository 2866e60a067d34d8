"""CPU seconds of the guards against silent faults, as a share of those of the run that they guard.

    python -m experiments.bench guards [--recipe math_cpu] [--steps 60] [--out FILE.json]

First a real run of one engine and one rank, and what a step of it costs all of its processes. Then its guards alone, on
its own batches. These are the checks of a batch part, the learner's guards before, between and after its updates, the
broker's, and the probe of a weight update in the learner. What a probe costs its engine is measured in a real one,
among requests as an update meets them. What is looked at once a run (an environment's template and tasks) is left out,
and so is the validation of messages, which raises no alarm. Target: 1 %.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from experiments.bench._measuring import Timing, parser_of, temporary_run, write
from experiments.bench._processes import watched
from experiments.bench._ratios import Idle, provenance, ratio_of
from experiments.compare.job import read_lines
from rl.learner.batches import check_batch_part
from rl.learner.diagnostics import surprise
from rl.learner.process import Learner
from rl.learner.publish import probe_length, probe_logp
from rl.learner.update import UpdateStats
from rl.observe.alarms import Alarms
from rl.store.batch_files import read_batch_parts
from rl.weights.updater import LONG_PROBES
from rl.wire.messages import BatchPart, TokenSequence, Trajectory, Turn
from rl.wire.process import Process
from rl.wire.run import ProcessContext, RunFile
from rollout.broker.actions import BatchSample, EmitBatch, EpisodeOutcome, GroupRecord
from rollout.broker.guards import BatchGuards
from rollout.broker.rules import Rules
from rollout.broker.statistics import Statistics

T = TypeVar("T")
TARGET = 0.01
_WARM_STEPS = 10
_OVERRIDES = (
    "generator.count=1",
    "learner.ranks=1",
    "eval.every=0",
    "eval.tasks=8",
    "tracking.replay=full",
    "tracking.wandb=disabled",
)


class Stopwatch:
    """Seconds within guards."""

    def __init__(self) -> None:
        self.spent = Timing(0.0, 0.0)

    def __call__(self, guard: Callable[..., T], *arguments: Any, **named: Any) -> T:
        begin = now()
        try:
            return guard(*arguments, **named)
        finally:
            spent = since(begin)
            self.spent = Timing(self.spent.wall_s + spent.wall_s, self.spent.cpu_s + spent.cpu_s)


def now() -> Timing:
    return Timing(time.perf_counter(), time.process_time())


def since(begin: Timing) -> Timing:
    end = now()
    return Timing(end.wall_s - begin.wall_s, end.cpu_s - begin.cpu_s)


def guarded_step(
    learner: Learner, broker: BatchGuards, batch: EmitBatch, batch_part: BatchPart, watch: Stopwatch
) -> None:
    """A step as `rl.learner.process.train` does it, and what is done elsewhere for the same batch."""
    for group_id in dict.fromkeys(row.group_id for row in batch_part.rows):
        watch(broker.ended, GroupRecord(group_id, group_id, "trained", 0, 0, [], 0.0))
    watch(broker.batch, batch, Statistics())
    watch(check_batch_part, batch_part, step=batch_part.step, rank=0, timeline=batch_part.timeline, staleness_bound=1)
    minibatches = learner.trainer.minibatches(batch_part)
    watch(learner.guards.batch, batch_part, minibatches)
    learner.token_log.batch(batch_part)

    for pack in (pack for minibatch in minibatches for pack in minibatch.packs):
        drawn = -torch.rand(int(pack.mask.sum()), dtype=torch.float64)
        watch(surprise, drawn, -drawn)

    stats = UpdateStats()
    for minibatch in minibatches:
        update = learner.trainer.update(minibatch, batch_part.step)
        watch(learner.guards.updated, minibatch, update)
        stats.add(update)
    learner.token_log.write_batch()
    watch(learner.guards.trained, stats.metrics(), stats.routing)

    watch(
        probe_logp,
        learner.policy,
        batch_part.columns["token_ids"][: probe_length(learner.config, LONG_PROBES)].tolist(),
    )


def batch_of(batch_part: BatchPart) -> EmitBatch:
    """The same samples as the broker has them, as episodes of one turn."""
    ends = np.cumsum(batch_part.lengths)
    samples = []

    for row, length, end, starts in zip(batch_part.rows, batch_part.lengths, ends, batch_part.turn_starts, strict=True):
        won = row.reward > 0.5
        columns = {name: column[end - length : end] for name, column in batch_part.columns.items()}
        turn = Turn(starts[0], length, row.reward, 0.1, 0.01, "stop", 0)

        trajectory = Trajectory(
            *(0, 0, 0, row.sample_id, row.sample_id, row.group_id, row.group_id, "train", 0),
            sequences=[TokenSequence(columns=columns, turns=[turn])],
            reward=row.reward,
            success=won,
            stop_reason="done",
            tokens_generated=row.loss_tokens,
            seconds=0.1,
        )

        outcome = EpisodeOutcome(0, 0, row.reward, row.loss_tokens, success=won, payload=trajectory)
        samples.append(BatchSample(row.sample_id, row.group_id, row.group_id, 0, outcome))
    return EmitBatch(batch_part.step, samples, {})


def run_it(options: argparse.Namespace, folder: Path) -> tuple[Path, Timing]:
    """The run's folder, and seconds of a step: all steps but the first ten. Raises SystemExit if it fails."""
    settings = [f"steps={options.steps}", f"runs={folder}", "name=guarded", *_OVERRIDES]
    run = folder / "guarded"
    seen: dict[int, Timing] = {}  # by steps trained, from the first ones on

    def look() -> bool:
        trained = sum("train/loss" in line for line in read_lines(run / "metrics.jsonl"))
        if trained >= _WARM_STEPS:
            seen.setdefault(trained, Timing(watch.elapsed_s, watch.cpu_s))
        return not watch.running

    with watched([sys.executable, "-m", "launch.cli", "run", options.recipe, *settings], folder / "output") as watch:
        watch.until(look)
        watch.finish()
        if len(seen) < 2:
            watch.fail(f"the run ended after {max(seen, default=0)} steps")

    first, last = min(seen), max(seen)
    wall_s = seen[last].wall_s - seen[first].wall_s
    cpu_s = seen[last].cpu_s - seen[first].cpu_s
    return run, Timing(wall_s / (last - first), cpu_s / (last - first))


def guards_of(folder: Path) -> list[Timing]:
    """Seconds within guards, by batch of the run."""
    of_run = RunFile.load(folder)
    batch_parts = list(read_batch_parts(folder))
    with temporary_run(config=of_run.config, model_folder=of_run.model_folder) as run:
        learner = Learner(Process("learner", ProcessContext(run, 0, 0)))  # not entered: there is no supervisor
        broker = BatchGuards(Rules.of(run.config, 1000), Alarms(run.config.alarms, lambda _name, _detail: None))
        spent = []
        for batch_part in batch_parts:
            watch = Stopwatch()
            guarded_step(learner, broker, batch_of(batch_part), batch_part, watch)
            spent.append(watch.spent)
        dist.destroy_process_group()
    return spent[_WARM_STEPS:]


def engine_probe(folder: Path) -> tuple[Timing, float]:
    """What a probe adds to the seconds of an engine and its front, on average, and the standard error of its CPU's."""
    command = [sys.executable, "-m", "experiments.bench._engine_probe", str(folder)]
    told = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    found = json.loads(told.splitlines()[-1])
    pairs = list(zip(found["with"], found["without"], strict=True))

    wall_s, cpu_s = ([probed[clock] - bare[clock] for probed, bare in pairs] for clock in range(2))
    error_s = statistics.stdev(cpu_s) / math.sqrt(len(cpu_s))
    return Timing(statistics.fmean(wall_s), statistics.fmean(cpu_s)), error_s


def main(argv: list[str]) -> None:
    parser = parser_of("guards", __doc__)
    parser.add_argument("--recipe", default="math_cpu")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(argv)

    with tempfile.TemporaryDirectory(prefix="fresco-guards-") as name, Idle() as idle:
        folder, step = run_it(options, Path(name))
        engine, engine_error_s = engine_probe(folder)
        guards = [Timing(each.wall_s + engine.wall_s, each.cpu_s + engine.cpu_s) for each in guards_of(folder)]

    ratio = ratio_of(guards, [step] * len(guards))
    verdict = ratio.verdict(at_most=TARGET, of="cpu", idle=idle)

    found = {
        "verdict": verdict,
        "step_cpu_ms": round(1000 * step.cpu_s, 1),
        "guards_cpu_ms": round(1000 * statistics.median(each.cpu_s for each in guards), 2),
        "engine_probe_cpu_ms": round(1000 * engine.cpu_s, 2),
        "engine_probe_standard_error_ms": round(1000 * engine_error_s, 2),
    }
    print("\n".join(f"{name}: {value}" for name, value in found.items()))
    print(f"guards, share of a step: {ratio}")
    write(options.out, found | provenance(idle, {"guards_over_step": ratio}))
