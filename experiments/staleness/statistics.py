"""Means with intervals, and which losses differ by more than chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.staleness.records import Record

# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T95 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


@dataclass(frozen=True)
class Estimate:
    """A mean over independent runs; `half_width` of its 95 % interval, infinite for a single run."""

    mean: float
    half_width: float
    runs: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (f" ± {self.half_width:.3f}" if self.runs > 1 else " (1)")


def estimate(values: Sequence[float]) -> Estimate:
    """Student's interval. Raises ValueError for no values."""
    if not values:
        raise ValueError("no runs to average")
    mean = statistics.fmean(values)
    runs = len(values)
    if runs == 1:
        return Estimate(mean, math.inf, 1)
    quantile = _T95[min(runs - 1, len(_T95) - 1)]

    return Estimate(mean, quantile * statistics.stdev(values) / math.sqrt(runs), runs)


def paired(records: Iterable[Record], loss: str, other: str, lags: Sequence[int]) -> Estimate | None:
    """Final accuracy of `loss` minus `other`, over all pairs of runs with the same lag and seed; None without a pair.

    Pairs share data order, sampling seeds and held-out tasks. Those of several lags are pooled: what is tested is
    whether the loss is better on stale data, not whether it is at each single lag.
    """
    finals = {(record.loss, record.lag, record.seed): record.final for record in records if not record.system}
    differences = [
        final - finals[other, lag, seed]
        for (name, lag, seed), final in finals.items()
        if name == loss and lag in lags and (other, lag, seed) in finals
    ]
    return estimate(differences) if differences else None


def separates(difference: Estimate) -> bool:
    """Whether the 95 % interval leaves out zero."""
    return abs(difference.mean) > difference.half_width
