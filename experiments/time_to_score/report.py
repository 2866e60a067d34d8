"""The tables: how much sooner each arm has the score that the synchronous one ends with, and what stands beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from experiments.bench._ratios import BUSY
from experiments.staleness.statistics import estimate
from experiments.time_to_score.runs import ARMS, SEEDS, Run
from experiments.time_to_score.sooner import final, label, seconds_to, sooner, verdict
from experiments.time_to_score.tasks import STUDY

MARK = "*"


def page(runs: Sequence[Run]) -> str:
    """Markdown: what is there and under which conditions, then a verdict and a table for each task."""
    parts = [_conditions(runs)]
    for name, task in STUDY.items():
        mine = [run for run in runs if run.task == name]
        parts.append(f"## {name}")
        parts.append(verdict(mine) if mine else "No run yet.")
        if mine:
            parts.append(_table(mine, task.goal))
    return "\n\n".join(parts)


def is_busy(run: Run) -> bool:
    """Others used more of the machine meanwhile than a benchmark allows."""
    return run.others > BUSY


def missing(runs: Sequence[Run]) -> dict[str, list[int]]:
    """Seeds of the study that are not there, by task and arm."""
    there = {run.key for run in runs}
    absent = {
        f"{name} {label(arm)}": [seed for seed in SEEDS if (name, arm, seed) not in there]
        for name in STUDY
        for arm in ARMS
    }
    return {cell: seeds for cell, seeds in absent.items() if seeds}


def _conditions(runs: Sequence[Run]) -> str:
    machines = sorted({run.machine for run in runs})
    busy = [run for run in runs if is_busy(run)]
    absent = missing(runs)
    listed = "; ".join(f"{cell}: seeds {', '.join(map(str, seeds))}" for cell, seeds in absent.items())

    lines = [f"{len(runs)} runs. Machine: {'; '.join(machines) or 'none yet'}."]
    if busy:
        shares = ", ".join(f"{run.task} {label(run.arm)} seed {run.seed}: {run.others:.0%}" for run in busy)
        lines.append(
            f"In {len(busy)} of them others used more than {BUSY:.0%} of the machine's cores. They count, and their "
            f"arms are marked ({MARK}): {shares}."
        )
    elif runs:
        lines.append(f"In none of them others used more than {BUSY:.0%} of the machine's cores.")
    count = sum(map(len, absent.values()))
    lines.append(f"{count} runs are missing: {listed}." if absent else "No run is missing.")
    return "\n\n".join(lines)


def _table(runs: Sequence[Run], goal: float) -> str:
    """One line for each arm that has runs."""
    titles = (
        "arm",
        "seeds",
        "steps",
        "CPU s",
        "used by others",
        "score at the end",
        f"seconds to {goal:.0%}",
        "sooner than synchronous, to its last score",
    )
    lines = [_row(titles), _row(["---"] * len(titles))]

    for arm in ARMS:
        these = [run for run in runs if run.arm == arm]
        if these:
            gained = "1" if arm == "sync" else str(sooner(runs, arm) or "–")
            lines.append(_row([*_facts(arm, these), to_goal(these, goal), gained]))
    return "\n".join(lines)


def _facts(arm: str, runs: Sequence[Run]) -> list[str]:
    busy = sum(map(is_busy, runs))
    others = [f"{run.others:.0%}" + (MARK if is_busy(run) else "") for run in runs]
    return [
        label(arm) + (f" {MARK}{busy}" if busy else ""),
        str(len(runs)),
        f"{statistics.fmean(len(run.seconds) for run in runs):.0f}",
        f"{statistics.fmean(run.cpu_s for run in runs):.0f}",
        ", ".join(others),
        str(estimate([final(run) for run in runs])),
    ]


def to_goal(runs: Sequence[Run], goal: float) -> str:
    """Median over the seeds, of which one that never has the score takes for ever."""
    needed = [seconds_to(run, goal) for run in runs]
    reached = [each for each in needed if each is not None]
    if 2 * len(reached) <= len(runs):  # the median is no number of seconds
        return f"– ({len(reached)} of {len(runs)})" if reached else "–"

    median = statistics.median([float("inf") if each is None else each for each in needed])
    return f"{median:.0f}" + (f" ({len(reached)} of {len(runs)})" if len(reached) < len(runs) else "")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
