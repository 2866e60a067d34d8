"""The table: how much sooner each arm has the score that the synchronous one ends with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.staleness.statistics import estimate
from experiments.time_to_score.runs import ARMS, Run

WINDOW = 5
"""Steps over which a score is averaged: one step's 128 answers sway by four points."""
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
        interval = f" ({self.low:.2f} to {self.high:.2f})" if self.seeds > 1 else " (one seed)"
        missed = f", {self.missed} of {self.seeds + self.missed} not reached" if self.missed else ""
        return (f"{self.mean:.2f} ×{interval}" if self.seeds else "–") + missed


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
    """Pairs by seed: the score is what that seed's synchronous run ends with. None where no pair is there."""
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


def table(runs: Sequence[Run]) -> str:
    """Markdown: a table for each task, one line for each arm."""
    parts = []
    for task in sorted({run.task for run in runs}):
        mine = [run for run in runs if run.task == task]
        lines = [
            f"## {task}\n",
            "| arm | seeds | steps | CPU s | score at the end | sooner than synchronous, to its last score |",
            "|---|---|---|---|---|---|",
        ]

        for arm in ARMS:
            these = [run for run in mine if run.arm == arm]
            if these:
                lines.append(_line(arm, these, sooner(mine, arm)))
        parts.append("\n".join(lines))

    return "\n\n".join(parts)


def _line(arm: str, runs: Sequence[Run], gained: Sooner | None) -> str:
    steps = statistics.fmean(len(run.seconds) for run in runs)
    cpu = statistics.fmean(run.cpu_s for run in runs)
    name = "synchronous" if arm == "sync" else f"α = {arm}"
    compared = "1" if arm == "sync" else str(gained or "–")
    return f"| {name} | {len(runs)} | {steps:.0f} | {cpu:.0f} | {estimate([final(run) for run in runs])} | {compared} |"
