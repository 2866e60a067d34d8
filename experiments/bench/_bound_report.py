"""What `compare` says of Fresco's runs beside their bounds (`experiments/bench/_bound.py`)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.bench._bound import AT_MOST, Bound
from experiments.bench._measuring import Timing
from experiments.bench._outcome import RunResult
from experiments.bench._ratios import Idle, Ratio, Spread, ratio_of

STOCK = "fresco over bound"
SHARED = "fresco over bound, each prompt once"
_UNEVEN = 1.1
"""The ratio of Fresco's learner to the bare one that does the same work may spread by so much, highest over lowest,
without being worth a line."""


def bound_report(runs: Sequence[RunResult], idle: Idle) -> tuple[dict[str, Any], dict[str, Ratio]]:
    """Print where the CPU seconds go, both ratios, their verdicts and what speaks against them; the same as a result.

    Raises ValueError for a run without a bound.
    """
    bounds = [_bound(run) for run in runs]
    _print_table(runs, bounds)

    ours = [Timing(run.wall_s, run.cpu_s) for run in runs]
    bare = {
        STOCK: [Timing(bound.stock, bound.stock_s + bound.engine_s) for bound in bounds],
        SHARED: [Timing(bound.shared, bound.shared_s + bound.engine_s) for bound in bounds],
    }
    ratios = {name: ratio_of(ours, timings) for name, timings in bare.items()}
    verdicts = {name: ratio.verdict(at_most=AT_MOST, of="wall", idle=idle) for name, ratio in ratios.items()}
    wrong = [line for name, timings in bare.items() for line in _beaten(name, ours, timings)]
    wrong += _learner_does_less(runs, bounds) + _uneven(runs, bounds)

    for name, ratio in ratios.items():
        print(f"{name}: {ratio}\n{verdicts[name]}")
    for line in wrong:
        print(line)

    result = {"runs": [_as_result(bound) for bound in bounds], "verdicts": verdicts, "against": wrong}
    return result, ratios


def tell_bound(bound: Bound) -> None:
    print(
        f"  bound {bound.stock:.1f} s, each prompt once {bound.shared:.1f} s: start {bound.start_s:.1f} s, CPU seconds "
        f"of a bare learner {bound.stock_s:.1f} and {bound.shared_s:.1f}, of a bare engine {bound.engine_s:.1f} with "
        f"{bound.at_once} requests at once; from one step in {bound.every}, scaled",
        flush=True,
    )


def _bound(run: RunResult) -> Bound:
    if run.bound is None:
        raise ValueError("a run without a bound")
    return run.bound


def _as_result(bound: Bound) -> dict[str, float]:
    return asdict(bound) | {"stock": bound.stock, "shared": bound.shared}


def cpu_by_side(run: RunResult) -> dict[str, float]:
    """CPU seconds of Fresco's learner, of its generator with the engine below it, and of everything else."""
    found = {"learner": 0.0, "engine": 0.0, "everything else": 0.0}
    for name, used in run.processes.items():
        side = "learner" if "rl.learner" in name else "engine" if "rollout.generator" in name else "everything else"
        found[side] += used.cpu_s
    return found


def _print_table(runs: Sequence[RunResult], bounds: Sequence[Bound]) -> None:
    table = Table("", "fresco", "bare", "bare, each prompt once", title=f"medians of {len(runs)} runs")
    ours = [cpu_by_side(run) for run in runs]
    rows = {
        "learner": ([bound.stock_s for bound in bounds], [bound.shared_s for bound in bounds]),
        "engine": ([bound.engine_s for bound in bounds], [bound.engine_s for bound in bounds]),
        "everything else": ([], []),
    }
    for name, bare in rows.items():
        shown = [[each[name] for each in ours], *bare]
        table.add_row(f"{name}, CPU s", *(f"{statistics.median(values):.1f}" if values else "" for values in shown))

    start = f"{statistics.median(bound.start_s for bound in bounds):.1f}"
    table.add_row("start, s", start, start, start)
    walls = [[run.wall_s for run in runs], [each.stock for each in bounds], [each.shared for each in bounds]]
    table.add_row("to the target, s", *(f"{statistics.median(values):.1f}" for values in walls))
    Console(highlight=False).print(table)
    print("Fresco's CPU seconds have its start in them, those of the bare sides do not")


def _beaten(name: str, ours: Sequence[Timing], bare: Sequence[Timing]) -> list[str]:
    """Says that a run was faster than its bound: then it is none."""
    faster = sum(run.wall_s < bound.wall_s for run, bound in zip(ours, bare, strict=True))
    return [f"{name}: the bound is wrong, in {faster} of {len(ours)} pairs Fresco was below it"] if faster else []


def _learner_does_less(runs: Sequence[RunResult], bounds: Sequence[Bound]) -> list[str]:
    """Says that a learner which computes shared prompts once needs less than a stock one, whose bound it may then
    beat."""
    ours = statistics.median(cpu_by_side(run)["learner"] for run in runs)
    stock = statistics.median(bound.stock_s for bound in bounds)
    if ours >= stock:
        return []
    return [
        f"Fresco's learner does less than the stock one: {ours:.1f} CPU seconds with its start, where that one needs "
        f"{stock:.1f} without. It computes a prompt once for all answers of a group; so does the bare learner of "
        f"'{SHARED}', which is the bound to look at here"
    ]


def _uneven(runs: Sequence[RunResult], bounds: Sequence[Bound]) -> list[str]:
    """Says that one work cost otherwise in a run than in its bound, minutes later, as where other guests share the
    host.

    The kernel's books do not show it: no time is stolen, each second does less. The bound measures some of the steps,
    which may differ from the rest, too.
    """
    found = [cpu_by_side(run)["learner"] / bound.shared_s for run, bound in zip(runs, bounds, strict=True)]
    spread = Spread(statistics.median(found), min(found), max(found))
    if spread.high <= spread.low * _UNEVEN:
        return []
    return [
        f"runs and their bounds are unevenly matched: Fresco's learner took {spread} times the CPU seconds of the bare "
        "one that does the same work. The machine's speed changed in between, or the measured steps were not like the "
        "rest: a single pair's ratio may be off by as much, look at the median"
    ]
