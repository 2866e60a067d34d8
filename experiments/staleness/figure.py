"""The study's figure: accuracy against steps for each finalist, final accuracy and ESS against the measured lag."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from experiments.staleness.grid import FINALISTS, LAGS
from experiments.staleness.records import Record
from experiments.staleness.report import select, summarise


def draw(records: Sequence[Record], path: Path) -> None:
    rows = -(-len(FINALISTS) // 3)
    figure, axes = pyplot.subplots(rows + 1, 3, figsize=(12, 3.1 * (rows + 1)), layout="constrained")
    for loss, axis in zip(FINALISTS, axes[:rows].flat, strict=False):
        _learning_curves(axis, records, loss)
    axes[0, 0].legend(fontsize=8, title="updates of lag")
    bottom = axes[rows]

    for index, loss in enumerate(FINALISTS):
        _against_lag(bottom[0], records, loss, "final", f"C{index}")
        _against_lag(bottom[1], records, loss, "ess", f"C{index}")

    bottom[0].set(title="final accuracy", xlabel="measured lag (updates)", ylim=(0, 1))
    bottom[1].set(title="effective sample size / tokens", xlabel="measured lag (updates)")
    bottom[1].legend(fontsize=8)
    _screen(bottom[2], records)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _learning_curves(axis: Any, records: Sequence[Record], loss: str) -> None:
    for index, lag in enumerate(LAGS):
        runs = select(records, loss, lag)
        if not runs:
            continue
        steps = sorted(set.intersection(*(set(run.evals) for run in runs)), key=int)
        values = [[run.evals[step] for run in runs] for step in steps]
        places = [int(step) for step in steps]
        color = pyplot.get_cmap("viridis")(index / len(LAGS))
        axis.plot(places, [sum(one) / len(one) for one in values], color=color, label=str(lag))
        axis.fill_between(places, [min(one) for one in values], [max(one) for one in values], color=color, alpha=0.15)

    axis.set(title=loss, xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))


def _against_lag(axis: Any, records: Sequence[Record], loss: str, field: str, color: str) -> None:
    """Forced lags as a line, with 95 % intervals where there are several seeds; the system's runs as stars."""
    forced = [row for lag in LAGS if (row := summarise(records, loss, lag))]
    errors = [(row["half_width"] or 0.0) if field == "final" else 0.0 for row in forced]
    axis.errorbar(
        [row["measured_lag"] for row in forced],
        [row[field] for row in forced],
        errors,
        color=color,
        marker=".",
        capsize=2,
        label=loss,
    )

    alphas = sorted({record.lag for record in records if record.system and record.loss == loss})
    rows = [row for alpha in alphas if (row := summarise(records, loss, alpha, system=True))]
    axis.plot([row["measured_lag"] for row in rows], [row[field] for row in rows], "*", color=color, markersize=12)


def _screen(axis: Any, records: Sequence[Record]) -> None:
    """Every loss at lag 4, first seed."""
    runs = {
        record.loss: record.final for record in records if (record.lag, record.seed, record.system) == (4, 1, False)
    }
    names = sorted(runs, key=lambda name: runs[name])
    axis.barh(names, [runs[name] for name in names], color=["C0" if name in FINALISTS else "0.7" for name in names])
    axis.tick_params(axis="y", labelsize=8)
    axis.set(title="lag 4, one seed", xlabel="final accuracy", xlim=(0, 1))
