"""Which runs the study consists of, in an order that is useful wherever it is cut short."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from algos.registry import loss_names

FINALISTS = ("reinforce", "grpo", "dapo", "m2po", "topr", "decoupled_ppo")
"""The losses that get every lag and seed: the naive one, four that stood the screen, one that weighs by ratios."""
SCREEN_LAGS = (0, 4)
LAGS = (0, 1, 2, 4, 8)
SEEDS = (1, 2, 3)

ALIASES = {"ppo": "grpo", "weighted_topr": "topr"}
"""Losses that are another one under the recipe's options and its advantage: run once, under the other's name."""

ON_POLICY = "reinforce"
"""At lag 0 and one optimizer step per batch, every ratio is 1 and most losses have this one's gradient."""


@dataclass(frozen=True, order=True)
class Job:
    """One run: a loss on data of `lag` updates ago."""

    loss: str
    lag: int
    seed: int

    @property
    def overrides(self) -> list[str]:
        return [f"algo.loss={self.loss}", f"seed={self.seed}"]


def study() -> Iterator[Job]:
    """Each run once: everyone's screen, then the finalists by lag, most telling first, with all seeds."""
    others = [name for name in loss_names() if name not in FINALISTS and name not in ALIASES]
    first, *further = SEEDS
    plan = [Job(loss, lag, first) for losses in (FINALISTS, others) for loss in losses for lag in SCREEN_LAGS]
    plan += [Job(loss, lag, first) for lag in (8, 2) for loss in FINALISTS]
    plan += [Job(loss, lag, seed) for lag in (4, 8, 0) for seed in further for loss in FINALISTS]
    plan += [Job(loss, lag, seed) for seed in SEEDS for lag in (2, 1) for loss in FINALISTS]
    yield from dict.fromkeys(plan)
