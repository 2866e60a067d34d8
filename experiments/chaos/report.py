"""What faults cost: seconds beyond those of a run of the same seed without faults."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.chaos.play import Played
from rl.observe.intervals import wilson


def costs(played: Played, free: Played) -> dict[str, dict[str, float]]:
    """The costs by kind and role: how many faults, and the seconds each one lost (mean and worst).

    The time from a fault to the next one, or to the end, less what the steps trained in it take without faults.
    """
    pace_s = free.seconds / (len(free.steps) - 1)
    ends = [when for when, _, _ in played.faults[1:]] + [played.steps[-1]]

    lost: defaultdict[str, list[float]] = defaultdict(list)
    for (begin, fault, _), end in zip(played.faults, ends, strict=True):
        trained = sum(begin <= at < end for at in played.steps)
        for group in (f"{fault.kind} {fault.role}", f"any {fault.role}"):
            lost[group].append(end - begin - trained * pace_s)
    return {
        group: {"faults": len(each), "mean_s": round(mean(each), 2), "worst_s": round(max(each), 2)}
        for group, each in sorted(lost.items())
    }


def report(played: Played, free: Played | None, tasks: int) -> dict[str, Any]:
    """What is kept of an experiment. `tasks`: of the final evaluation."""
    found: dict[str, Any] = {
        "faults": [f"step {int(fault.step)}: {did}" for _, fault, did in played.faults],
        "violations": [*played.violations],
        "steps": len(played.steps),
        "ledger": played.summary.get("ledger"),
        "eval": played.summary.get("eval"),
    }

    if not played.faults and played.steps:
        found["steps_at_s"] = [round(at - played.steps[0], 2) for at in played.steps]
    if len(played.steps) > 1:
        found["seconds"] = round(played.seconds, 1)
    if free is None:
        return found

    found["violations"] += [f"without faults: {each}" for each in free.violations]
    if not played.summary or not free.summary:
        return found

    found |= {
        "seconds_without_faults": round(free.seconds, 1),
        "effective_training_time": round(free.seconds / played.seconds, 3),
        "costs": costs(played, free),
    }
    if played.summary["eval"] and free.summary["eval"]:
        low, high = interval(played, tasks)
        free_low, free_high = interval(free, tasks)
        found["final_accuracy_95"] = {"with_faults": [low, high], "without": [free_low, free_high]}
        if max(low, free_low) > min(high, free_high):
            found["violations"].append("the final evaluations differ: their intervals do not overlap")
    return found


def played_before(result: Path) -> Played:
    """A run without faults, as far as a comparison needs it, from what `report` said of it."""
    found = json.loads(result.read_text())
    summary = {"eval": found["eval"], "ledger": found["ledger"]}
    return Played(steps=found["steps_at_s"], violations=found["violations"], summary=summary)


def interval(played: Played, tasks: int) -> tuple[float, float]:
    low, high = wilson(played.summary["eval"]["last"] * tasks, tasks)
    return round(low, 4), round(high, 4)


def table(by_group: dict[str, dict[str, float]]) -> str:
    """The table, as Markdown."""
    lines = ["| fault | number | lost, mean s | lost, worst s |", "|---|---|---|---|"]
    rows = (
        f"| {group} | {each['faults']} | {each['mean_s']} | {each['worst_s']} |" for group, each in by_group.items()
    )
    return "\n".join([*lines, *rows])
