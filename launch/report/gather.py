"""What a run's folder says of it: how it ended, its rows, its books, and who waited for whom."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from filelock import FileLock, Timeout

from launch.provenance import FILE as PROVENANCE
from launch.provenance import flat, read_provenance
from launch.report.blocks import Arrays
from launch.report.samples import SamplePage, gather_samples
from launch.report.tasks import rates, task_facts
from launch.report.timeline import Timeline, gather_timeline
from launch.sittings import read_rows
from rl.config.damage import read_lines, reading
from rl.observe.alarms import read_alarms
from rl.observe.intervals import Z95, paired_bootstrap
from rl.wire.run import RunFile

_WITHOUT = "move it away, and the report is made without it"
LAB = "lab.json"
"""What `fresco lab` found."""
_MOST_ROWS = 3000
_BINS = 40
_MOST_HISTOGRAMS = 400
Row = dict[str, Any]


@dataclass
class RunPage:
    """What the page shows of one run: `facts` as JSON, and arrays by block."""

    facts: dict[str, Any]
    arrays: dict[str, Arrays] = field(default_factory=dict)


def gather(folder: Path) -> RunPage:
    """What the report shows of a run that has ended in any way, or goes on. Raises ConfigError where a
    file that it needs is damaged."""
    run = RunFile.load(folder)
    alarms = read_alarms(folder)
    timeline: Timeline = gather_timeline(folder, run.started_at, alarms)
    samples: SamplePage = gather_samples(folder, run)
    with reading(folder / PROVENANCE, _WITHOUT):
        origin = read_provenance(folder, run.config)

    rows: list[Row] = []
    with reading(folder / "metrics.jsonl", _WITHOUT):
        rows = list(read_rows(folder))
        facts = _of_rows(rows, run)
    with reading(folder / "evals.jsonl", _WITHOUT):
        evals = list(read_lines(folder / "evals.jsonl", dict[str, Any]))
        facts["evaluations"] = evaluations(rows, run, evals)
        of_tasks = gain(evals), task_facts(evals, samples.facts["episodes"])
    with reading(folder / "summary.json", _WITHOUT):
        facts |= _of_summary(folder, run, rows, facts)
    with reading(folder / LAB, _WITHOUT):
        facts["lab"] = _json(folder / LAB) or None

    facts |= {
        "name": run.config.name,
        "origin": origin,
        "config": flat(run.config.model_dump(mode="json")),
        "started": run.started_at,
        "startStep": min([run.start_step, *(int(row["step"]) - 1 for row in rows if "train/loss" in row)]),
        "batch": run.config.batch_size,
        "gain": of_tasks[0],
        "tasks": of_tasks[1],
        "alarms": [msgspec.structs.asdict(alarm) for alarm in alarms],
        "waits": timeline.waits,
        "failures": timeline.failures,
        "timeline": timeline.facts,
        "samples": samples.facts,
    }
    return RunPage(facts, {"timeline": timeline.arrays, "samples": samples.arrays})


def _of_rows(rows: list[Row], run: RunFile) -> dict[str, Any]:
    """What the rows of metrics say, the books of a run that could not close them included."""
    trained = [row for row in rows if "train/loss" in row]
    return {
        "rows": columns(_thinned(trained, _MOST_ROWS), run),
        "histograms": histograms(_thinned(trained, _MOST_HISTOGRAMS)),
        "seconds": float(rows[-1]["time"]) - run.started_at if rows else 0.0,
        "ledger": ledger(trained[-1] if trained else {}, len(trained), run),
        "staleness": _staleness(trained),
    }


def _of_summary(folder: Path, run: RunFile, rows: list[Row], known: dict[str, Any]) -> dict[str, Any]:
    """How it ended, and its books; what is `known` without them stands for what they do not say."""
    summary = _json(folder / "summary.json")
    broker = summary.get("broker", {})
    trained = [row for row in rows if "train/loss" in row]

    return {
        "state": state(folder, run, summary, trained[-1] if trained else {}),
        "error": summary.get("error", ""),
        "seconds": summary.get("seconds") or known["seconds"],
        "ledger": summary.get("ledger") or known["ledger"],
        "staleness": (summary.get("staleness") or {}).get("histogram") or known["staleness"],
        "violations": summary.get("freshness_violations"),
        "summary": {key: value for key, value in summary.items() if isinstance(value, float | int | str)},
        "failed": broker.get("cut", {}).get("failed", {}).get("running", {}),
        "cut": broker.get("kept_against_cut", {}),
    }


def state(folder: Path, run: RunFile, summary: dict[str, Any], last: Row) -> str:
    """`finished`, `stopped` early, `failed`, `running`, or `killed`: nothing was left to say how it ended.

    last: the row of the last trained batch.
    """
    if summary:
        if summary.get("error"):
            return "failed"
        finished = run.start_step + summary["steps"] >= run.last_step or last.get("time/over", 0.0) >= 1
        return "finished" if finished else "stopped"
    return "running" if is_running(folder) else "killed"


def is_running(folder: Path) -> bool:
    """Whether a process holds the run's lock."""
    if not (folder / "lock").exists():
        return False
    try:
        with FileLock(folder / "lock").acquire(timeout=0):
            return False
    except Timeout:
        return True


def columns(rows: Sequence[Row], run: RunFile) -> dict[str, list[float | None]]:
    """The columns by name, with an entry for each row; `reward/low` and `reward/high` are the 95 % interval of a
    batch's mean reward."""
    for row in rows:
        row["seconds"] = row["time"] - run.started_at
        if rewards := row.get("histogram/reward"):
            row |= reward_interval(rewards, run.config.rollout.group_size)

    names = dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list))
    return {name: [row.get(name) for row in rows] for name in names}


def reward_interval(rewards: Sequence[float], group_size: int) -> Row:
    """The interval of the mean reward by the spread between groups: members of a group share a task and are not
    independent."""
    groups = np.asarray(rewards[: len(rewards) // group_size * group_size], np.float64).reshape(-1, group_size).mean(1)
    if len(groups) < 2:
        return {}
    half = Z95 * float(groups.std(ddof=1)) / math.sqrt(len(groups))
    return {"reward/low": float(groups.mean()) - half, "reward/high": float(groups.mean()) + half}


def histograms(rows: Sequence[Row]) -> dict[str, Any]:
    """The histograms by name: the common edges, and the counts of each row."""
    found: dict[str, Any] = {"steps": [row["step"] for row in rows]}
    for name in sorted({name for row in rows for name in row if name.startswith("histogram/")}):
        every = np.concatenate([np.asarray(row.get(name, []), np.float64) for row in rows])
        edges = np.histogram_bin_edges(every, _BINS)
        counts = [np.histogram(row.get(name, []), edges)[0].tolist() for row in rows]
        found[name.removeprefix("histogram/")] = {"edges": edges.tolist(), "counts": counts}
    return found


def evaluations(rows: Sequence[Row], run: RunFile, evals: Sequence[Row]) -> list[Row]:
    """The evaluations, each with 95 % intervals over its tasks, as a whole and by held-out set."""
    by_version: defaultdict[int, list[Row]] = defaultdict(list)
    for episode in evals:
        by_version[episode["version"]].append(episode)

    found = []
    for row in rows:
        if "eval/accuracy" not in row:
            continue

        episodes = by_version[row["step"]]
        labels = sorted({episode.get("label", "") for episode in episodes})
        sets = {label: rates(each for each in episodes if each.get("label", "") == label) for label in labels}
        whole = rates(episodes) if episodes else {"avg": (row["eval/accuracy"], 0.0, 1.0)}
        accuracy, low, high = whole["avg"]

        where = {"step": row["step"], "seconds": row["time"] - run.started_at, "low": low, "high": high}
        samples = 1 + max((episode.get("sample", 0) for episode in episodes), default=0)
        found.append({"accuracy": accuracy, "samples": samples, "all": whole, "sets": sets} | where)
    return found


def gain(rows: Sequence[Row]) -> list[float] | None:
    """(mean, low, high) of the last evaluation less the first, over the tasks that both have."""
    success: defaultdict[int, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        success[row["version"]][row["task_index"]].append(row["success"])
    if len(success) < 2:
        return None

    before = success[min(success)]
    after = success[max(success)]
    tasks = sorted(before.keys() & after.keys())
    means = [[fmean(of[task]) for task in tasks] for of in (before, after)]
    return list(paired_bootstrap(means[0], means[1])) if tasks else None


def ledger(last: Row, steps: int, run: RunFile) -> dict[str, dict[str, float]] | None:
    """The samples by state; of a run that could not close its books, the samples as its last row has them."""
    if not last:
        return None
    counts = {name: last.get(f"queue/{name}", 0) for name in ("queued", "running", "waiting", "batched")}
    ends = ("stale", "filtered", "settled", "redundant", "failed")
    counts |= {name: last.get(f"broker/{name}_samples", 0) for name in ends}
    counts["trained"] = steps * run.config.batch_size
    return {"samples": {"issued": sum(counts.values())} | counts}


def _staleness(rows: Sequence[Row]) -> dict[str, int]:
    """Samples by their age."""
    counts = Counter(int(age) for row in rows for age in row.get("staleness", []))
    return {str(age): counts[age] for age in sorted(counts)}


def _thinned(rows: list[Row], most: int) -> list[Row]:
    """Entries that are evenly spread, the last one included."""
    if len(rows) <= most:
        return rows
    return [rows[place] for place in np.linspace(0, len(rows) - 1, most).astype(int)]


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    return found
