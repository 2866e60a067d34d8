"""One run of the study: the plain loop with batches that wait `lag` updates between sampling and training.

Advantages, packing, loss, optimizer and environment are production's; only the queue that makes data old is new here.
Batch s is sampled from the policy of version max(0, s - lag), so the first `lag` batches are younger than set.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.plain_loop import PlainLoop, PlayedEpisode
from experiments.staleness import sampler
from experiments.staleness.grid import Job
from experiments.staleness.records import RECIPE, Record, setting
from launch.warm_start.sampling import Sampled
from rl.config.schema import Config, load_config

CURVES = {
    "reward": "reward/mean",
    "lag": "loss/token_staleness",
    "ess": "loss/ess",
    "kl": "loss/kl_behavior",
    "entropy": "loss/entropy",
    "ratio_max": "loss/ratio_max",
    "grad_norm": "train/grad_norm",
}
"""Curve of a record: metric of the learner."""

REPEATED_STEPS = 4
"""Steps after which a run at lag 0 is compared with the on-policy one."""


class LaggedLoop(PlainLoop):
    """The plain loop with the study's sampler."""

    def __init__(self, config: Config, folder: Path) -> None:
        super().__init__(config, folder, self._sample_fast)

    def _sample_fast(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], temperature: float, max_tokens: int
    ) -> list[Sampled]:
        return sampler.sample(
            self.policy.model,
            prompts,
            seeds=seeds,
            stop_ids=self.tokenizer.stop_ids,
            max_tokens=max_tokens,
            temperature=temperature,
        )


def _repeats(curves: dict[str, list[float]], others: dict[str, list[float]]) -> bool:
    """Whether rewards, gradient norms and entropies agree to rounding so far."""
    return all(
        math.isclose(mine, theirs, rel_tol=2e-3)
        for name in ("reward", "grad_norm", "entropy")
        for mine, theirs in zip(curves[name], others[name], strict=False)
    )


def job_config(job: Job, overrides: tuple[str, ...] = ()) -> Config:
    """The study's recipe with what the job sets."""
    return load_config(RECIPE, [*job.overrides, *overrides])


def run_job(
    job: Job,
    folder: Path,
    overrides: tuple[str, ...] = (),
    on_policy: Record | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Record:
    """Train one policy from the model in `folder`; a gradient that is not finite ends the run and is recorded.

    on_policy: the run of `grid.ON_POLICY` at lag 0. One that repeats its first steps exactly has the same gradient, so
    it is recorded as equal, with the other's numbers, instead of being computed again.
    """
    begin = time.process_time()
    ended = "finished"
    loop = LaggedLoop(job_config(job, overrides), folder)
    evals: dict[str, float] = {}
    curves: dict[str, list[float]] = {name: [] for name in CURVES}
    waiting: deque[list[PlayedEpisode]] = deque()
    sampled = 0
    steps = loop.config.steps
    every = loop.config.eval.every

    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            evals[str(step)] = round(loop.evaluate(0.0), 4)
            report(f"{job.loss} lag {job.lag} seed {job.seed} step {step}: {evals[str(step)]:.3f}")

        if step == steps:
            break
        while sampled <= min(step + job.lag, steps - 1):
            waiting.append(loop.rollout(sampled))
            sampled += 1

        try:
            row = loop.train(step, waiting.popleft(), min(step, job.lag))
        except FloatingPointError as error:
            ended = f"step {step}: {error}"
            evals[str(step)] = round(loop.evaluate(0.0), 4)
            break

        for name, metric in CURVES.items():
            curves[name].append(float(f"{row[metric]:.4g}"))
        if on_policy is not None and step + 1 == REPEATED_STEPS and _repeats(curves, on_policy.curves):
            ended = f"equal to {on_policy.loss}"
            evals = on_policy.evals
            curves = on_policy.curves
            break

    cpu_s = round(time.process_time() - begin, 2)
    return Record(job.loss, job.lag, job.seed, False, setting(), ended, cpu_s, evals, curves)
