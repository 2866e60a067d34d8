"""Which runs the study consists of, in an order that is useful wherever it is cut short."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from algos.registry import loss_names

FINALISTS = ("reinforce", "grpo", "decoupled_ppo", "tis")
"""The losses that get every lag and every seed."""
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
    """Each run once: finalists' screen, everyone's screen, finalists' other lags, then the further seeds."""
    others = [name for name in loss_names() if name not in FINALISTS and name not in ALIASES]
    first, *further = SEEDS
    plan = [Job(loss, lag, first) for losses in (FINALISTS, others) for loss in losses for lag in SCREEN_LAGS]
    plan += [Job(loss, lag, first) for lag in reversed(LAGS) for loss in FINALISTS]
    plan += [Job(loss, lag, seed) for seed in further for lag in sorted(LAGS, key=_by_interest) for loss in FINALISTS]
    yield from dict.fromkeys(plan)


def _by_interest(lag: int) -> int:
    return (4, 8, 0, 2, 1).index(lag)
