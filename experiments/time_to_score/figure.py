"""The curves: score over seconds, samples and steps, the mean of the seeds in a band from the worst to the best."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot

from experiments.time_to_score.runs import ARMS, WINDOW, Run
from experiments.time_to_score.sooner import smoothed
from experiments.time_to_score.tasks import STUDY

_POINTS = 100


def draw(runs: Sequence[Run], path: Path) -> None:
    """One row of three pictures for each task."""
    tasks = [name for name in STUDY if any(run.task == name for run in runs)]
    size = 12, 3.4 * len(tasks)
    figure, axes = pyplot.subplots(len(tasks), 3, figsize=size, layout="constrained", squeeze=False, sharey="row")

    for row, task in zip(axes, tasks, strict=True):
        for axis, unit in zip(row, ("seconds", "samples", "steps"), strict=True):
            for index, arm in enumerate(ARMS):
                these = [run for run in runs if (run.task, run.arm) == (task, arm) and len(run.scores) >= WINDOW]
                if these:
                    _band(axis, these, unit, arm, f"C{index}")
            axis.set(xlabel=unit, title=task)
        row[0].set(ylabel="right, of the samples of a step")
    axes[0, 0].legend(fontsize=8, title="α")

    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _band(axis: Any, runs: Sequence[Run], unit: str, arm: str, color: str) -> None:
    places = [_places(run, unit)[WINDOW - 1 :] for run in runs]
    grid = np.linspace(max(each[0] for each in places), min(each[-1] for each in places), _POINTS)
    curves = [np.interp(grid, each, smoothed(run.scores)) for each, run in zip(places, runs, strict=True)]

    axis.plot(grid, np.mean(curves, 0), color=color, label=arm)
    axis.fill_between(grid, np.min(curves, 0), np.max(curves, 0), color=color, alpha=0.15)


def _places(run: Run, unit: str) -> Sequence[float]:
    places: dict[str, Sequence[float]] = {
        "seconds": run.seconds,
        "samples": run.samples,
        "steps": range(1, len(run.scores) + 1),
    }
    return places[unit]
