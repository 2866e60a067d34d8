"""Which tasks a model fails: the success by type of task, and the tasks that are solved least."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rl.observe.intervals import over_tasks, success_rates

_MOST = 12
EVALUATIONS = 3  # over so many of the newest ones a task counts as hard
_OF_TYPE = "success_"
Row = dict[str, Any]


def types_of(info: Mapping[str, float], label: str = "") -> list[str]:
    """The types of an episode's task: its environment tells its success under their name; `label`: the environment, in
    a mixture."""
    found = []
    for name in info:
        where, _, last = name.rpartition("/")
        if last.startswith(_OF_TYPE):
            found.append(": ".join(part for part in (where, last.removeprefix(_OF_TYPE)) if part))
    return found or ([label] if label else [])


def task_facts(evals: Sequence[Row], episodes: Iterable[Row]) -> dict[str, Any]:
    """What the page shows. evals: the lines of `evals.jsonl`; episodes: those whose conversations were kept."""
    versions = sorted({row["version"] for row in evals})
    newest = [row for row in evals if row["version"] in versions[-EVALUATIONS:]]
    trained = [row for row in episodes if row["kind"] == "train" and not row["unrewarded"]]
    return {
        "types": _by_type(evals, versions),
        "versions": versions[:1] + versions[1:][-1:],
        "hardest": {"eval": _hardest(newest), "train": _hardest(trained)},
    }


def rates(rows: Iterable[Row]) -> dict[str, tuple[float, float, float]]:
    """`success_rates` without pass@1, which says what `avg` says."""
    found = success_rates((row["task_index"], row["success"]) for row in rows)
    return {name: rate for name, rate in found.items() if name != "pass@1"}


def _by_type(evals: Sequence[Row], versions: Sequence[int]) -> list[Row]:
    """The success at the first and the last evaluation, with its 95 % interval over tasks: the worst type first."""
    if not versions:
        return []
    by_type: defaultdict[str, defaultdict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in evals:
        label = row.get("label", "")
        for name in {*types_of(row.get("info", {}), label), label} - {""}:
            by_type[name][row["version"]].append(row)

    found = []
    for name, by_version in by_type.items():
        now = _of_tasks(by_version.get(versions[-1], []))
        before = _of_tasks(by_version.get(versions[0], []))
        mean, low, high = over_tasks(now)
        first = fmean(before) if before and len(versions) > 1 else None
        found.append({"type": name, "tasks": len(now), "success": mean, "low": low, "high": high, "first": first})
    return sorted((each for each in found if each["tasks"]), key=lambda each: (each["success"], each["type"]))


def _of_tasks(rows: Iterable[Row]) -> list[float]:
    by_task: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows:
        by_task[row["task_index"]].append(row["success"])
    return [fmean(values) for values in by_task.values()]


def _hardest(rows: Iterable[Row]) -> list[Row]:
    """The tasks that were solved least, the most often tried of them first; none that was solved every time."""
    by_task: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_task[row["task_index"]].append(row)

    found: list[Row] = [
        {
            "task": task,
            "tries": len(tried),
            "solved": sum(bool(row["success"]) for row in tried),
            "reward": fmean(row["reward"] for row in tried),
            "type": ", ".join(types_of(tried[-1].get("info", {}), tried[-1].get("label", ""))),
        }
        for task, tried in by_task.items()
    ]

    failed = [each for each in found if each["solved"] < each["tries"]]
    failed.sort(key=lambda each: (each["solved"] / each["tries"], -each["tries"], each["reward"], each["task"]))
    return failed[:_MOST]
