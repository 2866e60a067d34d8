"""Seconds of the guards against silent faults, as a share of the steps that they guard.

    python -m experiments.bench guards [--rounds 15] [--groups 16] [--hidden 128] [--out FILE.json]

The learner's own step on one batch, with the checks of its shard and the guards before, between and after its updates.
Generators and environments, which cost more than the learner, have no guard and are left out: the share of a whole run
is smaller. Target: 1 %.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from experiments.bench._measuring import Timing, parser_of, random_shard, temporary_run, write
from experiments.bench._ratios import Idle, provenance, ratio_of
from experiments.bench.learner import run_fields
from rl.core.messages import Shard
from rl.core.process import Process
from rl.core.run import ProcessContext
from rl.learner.batches import check_shard
from rl.learner.process import Learner
from rl.learner.update import UpdateStats

T = TypeVar("T")
TARGET = 0.01


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


def guarded_step(learner: Learner, shard: Shard, watch: Stopwatch) -> None:
    """As `rl.learner.process.train` does it."""
    watch(check_shard, shard, step=0, rank=0, epoch=0, staleness_bound=1)
    minibatches = learner.trainer.minibatches(shard)
    watch(learner.guards.batch, shard, minibatches)
    learner.kept.batch(shard)

    stats = UpdateStats()
    for minibatch in minibatches:
        update = learner.trainer.update(minibatch, shard.step)
        watch(learner.guards.updated, minibatch, update)
        stats.add(update)
    watch(learner.guards.trained, stats.metrics())


def main(argv: list[str]) -> None:
    parser = parser_of("guards", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.set_defaults(dtype="float32", device="cpu", lengths="mixed")
    arguments = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        overrides, fields = run_fields(Path(folder), arguments)
        with temporary_run([*overrides, "algo.kl.coef=0.01"], **fields) as run:
            learner = Learner(Process("learner", ProcessContext(run, 0, 0)))  # not entered: there is no supervisor
            rollout = run.config.rollout
            shard = random_shard(rollout.groups_per_batch, rollout.group_size, 16, (8, 40), 1024)

            guards = []
            steps = []
            with Idle() as idle:
                for number in range(-1, arguments.rounds):
                    learner.trainer.optimizer.adamw.state.clear()  # the first batch, again and again
                    watch = Stopwatch()
                    begin = now()
                    guarded_step(learner, shard, watch)
                    if number >= 0:
                        steps.append(since(begin))
                        guards.append(watch.spent)
            dist.destroy_process_group()

    ratio = ratio_of(guards, steps)
    verdict = ratio.verdict(at_most=TARGET, of="cpu", idle=idle)
    print(f"guards, share of a step: {ratio}; {verdict}")
    write(arguments.out, {"verdict": verdict} | provenance(idle, {"guards_over_step": ratio}))
