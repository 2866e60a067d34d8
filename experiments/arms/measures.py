"""What runs came to: means with intervals, seconds to a score, how much sooner than another arm, what was gained."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from experiments.arms.records import Record, Won
from experiments.arms.study import START, Study
from experiments.bench._ratios import BUSY
from rl.observe.intervals import paired_bootstrap, wilson

ALL = "all"
MARK = "*"
_MOST = 700.0
"""The largest value of a logarithm: the interval of one seed has no end."""
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T95 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)


@dataclass(frozen=True)
class Estimate:
    """A mean over independent runs, and the `half_width` of its 95 % interval, infinite for a single run."""

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


# ---------------------------------------------------------------- scores over seconds


def smoothed(scores: Sequence[float], window: int) -> list[float]:
    """Means over the last `window` steps; the first window - 1 entries are left out."""
    return [statistics.fmean(scores[end - window : end]) for end in range(window, len(scores) + 1)]


def final_score(record: Record, window: int) -> float:
    """The score of the last steps."""
    return smoothed(record.scores, window)[-1]


def final_accuracy(record: Record, window: int) -> float:
    """The accuracy in held-out tasks, as the mean of the last evaluations."""
    last = sorted(record.accuracy, key=int)[-window:]
    return statistics.fmean(record.accuracy[step] for step in last)


def seconds_to(record: Record, score: float, window: int) -> float | None:
    """When the averaged score was first there; None: never."""
    for second, found in zip(record.seconds[window - 1 :], smoothed(record.scores, window), strict=True):
        if found >= score:
            return second
    return None


@dataclass(frozen=True)
class Sooner:
    """Seconds of the baseline over seconds of an arm to the same score: geometric mean over seeds, 95 %."""

    mean: float
    low: float
    high: float
    seeds: int
    missed: int
    """Seeds whose run did not reach the score in its time; the mean is of the others."""

    def __str__(self) -> str:
        missed = f", {self.missed} of {self.seeds + self.missed} not reached" if self.missed else ""
        interval = f"({self.low:.2f} to {self.high:.2f})" if self.seeds > 1 else "(one seed)"
        return (f"{self.mean:.2f} × {interval}" if self.seeds else "–") + missed


def sooner(records: Sequence[Record], arm: str, study: Study) -> Sooner | None:
    """The score is what the baseline's run of the same seed ends with. None where no seed has both runs."""
    by_key = {(record.arm, record.seed): record for record in records if not record.how}
    logs = []
    missed = 0

    for (name, seed), record in by_key.items():
        base = by_key.get((study.baseline, seed))
        if name != arm or base is None:
            continue
        score = final_score(base, study.window)
        needed = seconds_to(record, score, study.window)
        if needed is None:
            missed += 1
            continue
        logs.append(math.log((seconds_to(base, score, study.window) or math.inf) / needed))

    if not logs:
        return Sooner(math.nan, math.nan, math.nan, 0, missed) if missed else None
    found = estimate(logs)
    mean, width = found.mean, found.half_width
    return Sooner(math.exp(mean), math.exp(mean - width), math.exp(min(mean + width, _MOST)), found.runs, missed)


# ---------------------------------------------------------------- evaluated tasks, before and after


def pairs(before: Won, after: Won, kind: str = ALL) -> tuple[list[float], list[float]]:
    """The outcomes of the tasks that both have answered, of one kind or of all. Raises ValueError for other tasks."""
    kinds = before if kind == ALL else [kind]
    both = [(x, y) for each in kinds for x, y in zip(before[each], after[each], strict=True) if "-" not in (x, y)]
    return [float(x) for x, _ in both], [float(y) for _, y in both]


def gained(
    records: Sequence[Record], seed: int, arm: str, how: str, *, over: str = START, kind: str = ALL
) -> tuple[float, float, float] | None:
    """(mean, low, high) of the difference, paired by task; None while one of both is missing."""
    won = {record.arm: record.won for record in records if (record.seed, record.how) == (seed, how)}
    return paired_bootstrap(*pairs(won[over], won[arm], kind)) if {over, arm} <= won.keys() else None


def share(values: Sequence[float]) -> str:
    """The share in percent, with Wilson's interval."""
    low, high = wilson(sum(values), len(values))
    return f"{100 * sum(values) / len(values):.1f} % ({100 * low:.1f} to {100 * high:.1f})"


# ---------------------------------------------------------------- columns of the table of arms


def _to_goal(study: Study, these: Sequence[Record], _all: Sequence[Record]) -> str:
    """Seconds since the command: the median over the seeds, of which one that never has the score takes for ever."""
    return _median([seconds_to(record, study.goal, study.window) for record in these])


def _trained_to_goal(study: Study, these: Sequence[Record], _all: Sequence[Record]) -> str:
    """The same since the first score, which is that of the start model where the score is an evaluation."""
    found = [(record.seconds[0], seconds_to(record, study.goal, study.window)) for record in these]
    return _median([None if needed is None else needed - first for first, needed in found])


def _median(needed: Sequence[float | None]) -> str:
    reached = [each for each in needed if each is not None]
    if 2 * len(reached) <= len(needed):  # the median is no number of seconds
        return f"– ({len(reached)} of {len(needed)})" if reached else "–"

    median = statistics.median([math.inf if each is None else each for each in needed])
    return f"{median:.0f}" + (f" ({len(reached)} of {len(needed)})" if len(reached) < len(needed) else "")


def _others(_study: Study, these: Sequence[Record], _all: Sequence[Record]) -> str:
    return ", ".join("?" if r.others is None else f"{r.others:.0%}" + MARK * is_busy(r) for r in these)


def _sooner(study: Study, these: Sequence[Record], every: Sequence[Record]) -> str:
    return "1" if these[0].arm == study.baseline else str(sooner(every, these[0].arm, study) or "–")


def is_busy(record: Record) -> bool:
    """Whether others used more of the machine meanwhile than a benchmark allows."""
    return (record.others or 0.0) > BUSY


def steps(record: Record) -> float:
    """Training steps of a run."""
    return float(len(record.scores) or record.facts.get("steps", 0))


Column = Callable[[Study, Sequence[Record], Sequence[Record]], str]
"""The text of a cell: of the study, the arm's runs, and all runs."""

COLUMNS: dict[str, Column] = {
    "steps": lambda _study, these, _all: ", ".join(f"{steps(record):.0f}" for record in these),
    "cpu_s": lambda _study, these, _all: ", ".join("?" if r.cpu_s is None else f"{r.cpu_s:.0f}" for r in these),
    "wall_s": lambda _study, these, _all: ", ".join("?" if r.wall_s is None else f"{r.wall_s:.0f}" for r in these),
    "others": _others,
    "score": lambda study, these, _all: str(estimate([final_score(record, study.window) for record in these])),
    "accuracy": lambda study, these, _all: str(estimate([final_accuracy(record, study.window) for record in these])),
    "seconds to goal": _to_goal,
    "training to goal": _trained_to_goal,
    "sooner": _sooner,
}


def column(study: Study, name: str, these: Sequence[Record], every: Sequence[Record]) -> str:
    """One cell of the table of arms; a name that is no measure is a fact of the runs, seed by seed."""
    if name in COLUMNS:
        return COLUMNS[name](study, these, every)
    return ", ".join(_number(record.facts[name]) if name in record.facts else "?" for record in these)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
