"""Table (markdown and JSON) of the study's runs; the figure is drawn by `figure.py`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from experiments.staleness.grid import ALIASES, FINALISTS, LAGS, ON_POLICY
from experiments.staleness.records import FINAL_EVALS, Record, setting
from experiments.staleness.statistics import Estimate, estimate, paired, separates

STALE_LAGS = (4, 8)
"""Lags whose runs are pooled when two losses are compared."""
MIN_PAIRS = 6
"""No verdict from fewer pairs: those of one seed resemble each other, so three seeds at both lags are the least."""


def select(records: Sequence[Record], loss: str, lag: float, system: bool = False) -> list[Record]:
    """All seeds of one loss at one lag (alpha, for the system)."""
    return [record for record in records if (record.loss, record.lag, record.system) == (loss, lag, system)]


def summarise(records: Sequence[Record], loss: str, lag: float, system: bool = False) -> dict[str, Any] | None:
    """One row of the table; None without a run."""
    runs = select(records, loss, lag, system)
    if not runs:
        return None
    final = estimate([run.final for run in runs])

    return {
        "loss": loss,
        "alpha" if system else "lag": lag,
        "runs": len(runs),
        "final": round(final.mean, 4),
        "half_width": round(final.half_width, 4) if len(runs) > 1 else None,
        "early": round(sum(run.early for run in runs) / len(runs), 4),
        "best": round(sum(max(run.evals.values()) for run in runs) / len(runs), 4),
        "measured_lag": round(sum(run.mean("lag") for run in runs) / len(runs), 3),
        "ess": round(sum(run.mean("ess") for run in runs) / len(runs), 4),
        "kl": round(sum(run.mean("kl") for run in runs) / len(runs), 5),
        "ended": sorted({run.ended for run in runs}),
    }


def forced_at(records: Sequence[Record], loss: str, lag: float, field: str) -> float | None:
    """The forced-lag value of `field` at a measured lag, on the line between its neighbours; None outside them."""
    rows = [row for row in (summarise(records, loss, forced) for forced in LAGS) if row]
    points: list[tuple[float, float]] = sorted((row["measured_lag"], row[field]) for row in rows)

    for (left, low), (right, high) in pairwise(points):
        if left <= lag <= right:
            return low + (high - low) * (lag - left) / (right - left)
    return None


def comparison(one: str, other: str, difference: Estimate) -> dict[str, Any]:
    """One line of the table of pairs."""
    return {
        "loss": one,
        "other": other,
        "difference": round(difference.mean, 4),
        "half_width": round(difference.half_width, 4),
        "pairs": difference.runs,
        "separates": separates(difference),
    }


def build(records: Sequence[Record]) -> dict[str, Any]:
    """All numbers of the report. Raises ValueError for runs that did not start from the same model."""
    for seed in {record.seed for record in records}:  # of the held-out problems, too
        starts = {record.evals["0"] for record in records if not record.system and record.seed == seed}
        if len(starts) > 1:
            raise ValueError(
                f"the runs of seed {seed} start from different models: held-out accuracies {sorted(starts)} at step 0"
            )

    names = sorted({record.loss for record in records if not record.system})
    lags = sorted({record.lag for record in records if not record.system})
    system = sorted({(record.loss, record.lag) for record in records if record.system})

    compared = []
    for one, other in combinations(FINALISTS, 2):
        difference = paired(records, one, other, STALE_LAGS)
        if difference is not None and difference.runs >= MIN_PAIRS:
            compared.append(comparison(one, other, difference))

    rows = []
    for loss, alpha in system:
        row = summarise(records, loss, alpha, system=True)
        assert row is not None
        expected = {field: forced_at(records, loss, row["measured_lag"], field) for field in ("final", "ess")}
        rows.append(row | {f"forced_{field}": value and round(value, 4) for field, value in expected.items()})

    return {
        "setting": setting(),
        "forced": [row for name in names for lag in lags if (row := summarise(records, name, lag))],
        "paired": compared,
        "system": rows,
    }


def markdown(report: dict[str, Any]) -> str:
    """The report's numbers as tables."""
    cells = {(row["loss"], row["lag"]): row for row in report["forced"]}
    losses = sorted({loss for loss, _lag in cells}, key=lambda loss: (loss not in FINALISTS, loss))
    lines = [
        f"Held-out greedy accuracy (256 tasks), mean of the last {FINAL_EVALS} evaluations; ± is the 95 % interval "
        "over seeds (Student), (1) a single run.",
        f"Recipe {report['setting']}. "
        + "; ".join(f"`{one}` is `{other}` here" for one, other in ALIASES.items())
        + f"; early is after a third of the run; = is the run of `{ON_POLICY}`: same gradient.",
        "",
        "| loss | " + "".join(f"lag {lag} | " for lag in LAGS) + "early, lag 4 | lag 8 | ESS, lag 4 | lag 8 |",
        "|---|" + "---|" * (len(LAGS) + 4),
    ]

    for loss in losses:
        row = [_cell(cells.get((loss, lag))) for lag in LAGS]
        stale = [(field, cells.get((loss, lag))) for field in ("early", "ess") for lag in STALE_LAGS]
        row += [f"{cell[field]:.3f}" if cell else "" for field, cell in stale]
        lines.append(f"| {loss} | " + " | ".join(row) + " |")

    if not report["paired"]:
        lines += ["", f"No two losses have the {MIN_PAIRS} pairs of runs that a comparison needs."]
    else:
        lines += _comparisons(report)

    if report["system"]:
        lines += _system(report)
    return "\n".join(lines) + "\n"


def _comparisons(report: dict[str, Any]) -> list[str]:
    lines = ["", f"Paired by seed and lag, over lags {' and '.join(map(str, STALE_LAGS))}:", ""]
    lines += ["| loss | minus | difference | pairs | separates |", "|---|---|---|---|---|"]
    for row in report["paired"]:
        verdict = "yes" if row["separates"] else "no"
        difference = f"{row['difference']:+.3f} ± {row['half_width']:.3f}"
        lines.append(f"| {row['loss']} | {row['other']} | {difference} | {row['pairs']} | {verdict} |")
    return lines


def _system(report: dict[str, Any]) -> list[str]:
    lines = ["", "The complete asynchronous system against the forced-lag curve at its measured lag:", ""]
    lines += ["| loss | alpha | runs | measured lag | final | forced | ESS | forced |", "|---|" + "---|" * 7]
    for row in report["system"]:
        numbers = [row["measured_lag"], row["final"], row["forced_final"], row["ess"], row["forced_ess"]]
        texts = [f"{number:.3f}" if number is not None else "-" for number in numbers]
        lines.append(f"| {row['loss']} | {row['alpha']:g} | {row['runs']} | " + " | ".join(texts) + " |")
    return lines


def write(records: Sequence[Record], folder: Path) -> None:
    """`table.md` and `table.json`."""
    report = build(records)
    (folder / "table.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "table.md").write_text(markdown(report))


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    text = str(Estimate(row["final"], row["half_width"] or 0.0, row["runs"]))
    return text + (" =" if any(ended.startswith("equal") for ended in row["ended"]) else "")
