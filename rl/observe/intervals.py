"""Confidence intervals of success rates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

Z95 = 1.959964  # two-sided 95 % quantile of the normal distribution


def wilson(successes: float, count: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson, 1927); (0, 1) for no trial."""
    if count == 0:
        return 0.0, 1.0
    share = successes / count
    scale = 1 / (1 + z * z / count)
    centre = scale * (share + z * z / (2 * count))
    half = scale * z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # rounding at 0 and 1


def over_tasks(means: Sequence[float], z: float = Z95) -> tuple[float, float, float]:
    """(mean, low, high) of a success rate that is a mean over tasks, each of them a mean of its own samples.

    Samples of one task are not independent: the spread between tasks says how many independent trials the mean is
    worth, and Wilson's interval is that of so many. With one sample a task it is Wilson's. (0, 0, 1) for no task.
    """
    if not means:
        return 0.0, 0.0, 1.0
    values = np.asarray(means, np.float64)
    share = float(values.mean())
    variance = float(values.var(ddof=1)) / len(values) if len(values) > 1 else 0.0
    trials = max(len(values), share * (1 - share) / variance) if variance else len(values)
    return share, *wilson(share * trials, trials, z)


def pass_at(k: int, solved: int, tried: int) -> float:
    """The unbiased estimate, of `tried` samples of one task, that one of k samples solves it (Chen et al., 2021)."""
    if not 1 <= k <= tried:
        raise ValueError(f"pass@{k} of {tried} samples: at least {k} are needed")
    return 1 - math.comb(tried - solved, k) / math.comb(tried, k)


def pass_rates(tasks: Iterable[Sequence[float]]) -> dict[int, list[float]]:
    """By k = 1, 2, 4 ... up to the most samples that every task has, and that number: pass@k of each task.

    tasks: the success of the samples of each one.
    """
    counts = [(sum(value >= 1 for value in samples), len(samples)) for samples in tasks if samples]
    most = min((tried for _, tried in counts), default=0)
    ks = sorted({2**power for power in range(most.bit_length())} | ({most} if most else set()))
    return {k: [pass_at(k, *count) for count in counts] for k in ks}


def success_rates(episodes: Iterable[tuple[int, float]]) -> dict[str, tuple[float, float, float]]:
    """(mean, low, high) of `avg`, and of `pass@k` where tasks have several samples, over the tasks of an evaluation.

    episodes: of each its task and its success.
    """
    by_task: defaultdict[int, list[float]] = defaultdict(list)
    for task, success in episodes:
        by_task[task].append(success)

    found = {"avg": over_tasks([sum(values) / len(values) for values in by_task.values()])}
    several = any(len(values) > 1 for values in by_task.values())
    passed = pass_rates(by_task.values()) if several else {}
    return found | {f"pass@{k}": over_tasks(rates) for k, rates in passed.items()}


def paired_bootstrap(
    before: Sequence[float], after: Sequence[float], draws: int = 10_000, seed: int = 0
) -> tuple[float, float, float]:
    """(mean, low, high) of after - before over the same tasks: 95 % percentile bootstrap over tasks.

    Raises ValueError when the two do not match or are empty.
    """
    if len(before) != len(after) or not before:
        raise ValueError(f"{len(before)} results before and {len(after)} after: tasks must be the same, and some")
    difference = np.asarray(after, np.float64) - np.asarray(before, np.float64)  # (tasks,)
    values, counts = np.unique(difference, return_counts=True)
    # Drawing tasks with replacement is drawing how often each value occurs.
    drawn = np.random.default_rng(seed).multinomial(difference.size, counts / difference.size, draws)  # (draws, values)
    means = drawn @ values / difference.size
    low, high = np.quantile(means, [0.025, 0.975])
    return float(difference.mean()), float(low), float(high)
