"""What the study says: how much sooner an arm has the synchronous arm's last score, and which arm has it soonest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.staleness.statistics import estimate
from experiments.time_to_score.runs import ARMS, WINDOW, Run

_MOST = 700.0
"""Of a logarithm: the interval of one seed has no end."""


@dataclass(frozen=True)
class Sooner:
    """Seconds of the synchronous arm over seconds of another to the same score: geometric mean over seeds, 95 %."""

    mean: float
    low: float
    high: float
    seeds: int
    missed: int
    """Seeds whose run did not reach the score in its time; the mean is of the others."""

    def __str__(self) -> str:
        missed = f", {self.missed} of {self.seeds + self.missed} not reached" if self.missed else ""
        return (f"{self.mean:.2f} × {self.interval}" if self.seeds else "–") + missed

    @property
    def interval(self) -> str:
        return f"({self.low:.2f} to {self.high:.2f})" if self.seeds > 1 else "(one seed)"

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 1, which is as soon as the synchronous arm."""
        return not self.low <= 1.0 <= self.high

    def overlaps(self, other: Sooner) -> bool:
        return self.low <= other.high and other.low <= self.high


def label(arm: str) -> str:
    """As a reader knows it."""
    return "synchronous" if arm == "sync" else f"α = {arm}"


def smoothed(scores: Sequence[float]) -> list[float]:
    """Means over the last `WINDOW` steps; the first WINDOW - 1 entries are left out."""
    return [statistics.fmean(scores[end - WINDOW : end]) for end in range(WINDOW, len(scores) + 1)]


def final(run: Run) -> float:
    """Score at the end of the run's time."""
    return smoothed(run.scores)[-1]


def seconds_to(run: Run, score: float) -> float | None:
    """When the averaged score was first there; None: never."""
    for second, found in zip(run.seconds[WINDOW - 1 :], smoothed(run.scores), strict=True):
        if found >= score:
            return second
    return None


def sooner(runs: Sequence[Run], arm: str) -> Sooner | None:
    """Of one task's runs, paired by seed: the score is what that seed's synchronous run ends with. None: no pair."""
    by_key = {(run.arm, run.seed): run for run in runs}
    logs = []
    missed = 0

    for run in runs:
        base = by_key.get(("sync", run.seed))
        if run.arm != arm or base is None:
            continue
        score = final(base)
        needed = seconds_to(run, score)
        if needed is None:
            missed += 1
            continue
        logs.append(math.log((seconds_to(base, score) or math.inf) / needed))

    if not logs:
        return Sooner(math.nan, math.nan, math.nan, 0, missed) if missed else None
    found = estimate(logs)
    mean, width = found.mean, found.half_width
    return Sooner(math.exp(mean), math.exp(mean - width), math.exp(min(mean + width, _MOST)), found.runs, missed)


def verdict(runs: Sequence[Run]) -> str:
    """One task's runs in a sentence or two: which α has the score soonest, and from what it can be told apart.

    An arm that missed the score in a seed has a mean over its better ones, so it cannot be the soonest; neither can one
    with fewer seeds than another. The intervals are of each arm alone: the best of several is chosen by what was
    measured, so that its own interval is a little too favourable.
    """
    found = {arm: each for arm in ARMS if arm != "sync" and (each := sooner(runs, arm)) is not None}
    whole = {arm: each for arm, each in found.items() if not each.missed}
    if not whole:
        why = "reached the synchronous score in every seed" if found else "has a synchronous run of its seed beside it"
        return f"Best α: unknown, no arm {why}."

    most = max(each.seeds for each in whole.values())
    best = max((arm for arm in whole if whole[arm].seeds == most), key=lambda arm: whole[arm].mean)
    gained = whole[best]
    figure = f"{label(best)}: {gained}"
    if not any(each.differs for each in whole.values()):
        return f"Best α: no arm differs from synchronous; the soonest is {figure}."
    if gained.differs and gained.mean < 1:
        return f"Best α: synchronous is sooner than every arm; the best of them is {figure}."
    if not gained.differs:
        others = [f"{label(arm)} ({each})" for arm, each in whole.items() if each.differs]
        return f"Best α: {figure} is no certain gain, its interval has 1 in it; that of {', '.join(others)} has not."

    rivals = [label(arm) for arm, each in whole.items() if arm != best and each.overlaps(gained)]
    beside = f" It does not differ from {', '.join(rivals)}: the intervals overlap." if rivals else ""
    return f"Best α: {label(best)} is soonest: {gained}, which leaves out 1.{beside}"
