"""What a run's folder says of it: how it ended, its rows, its books, and who waited for whom.

Files that grow with the run are read line by line, twice: to choose what is shown, and that alone. Memory follows the
page, for a report is also made in the supervisor's process, beside a learner that needs the memory.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
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
from launch.report.tasks import EVALUATIONS, rates, task_facts
from launch.report.timeline import Timeline, gather_timeline
from rl.config.damage import lines_at, placed_lines, reading
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

    with reading(folder / "metrics.jsonl", _WITHOUT):
        rows = Rows(folder / "metrics.jsonl")
        facts = _of_rows(rows, run)
    with reading(folder / "evals.jsonl", _WITHOUT):
        evals = Evals(folder / "evals.jsonl")
        facts["evaluations"] = evaluations(rows.evaluated, run, evals)
        shown = evals.of({*evals.versions[:1], *evals.versions[-EVALUATIONS:]})
        of_tasks = gain(shown), task_facts(shown, samples.facts["episodes"])
    with reading(folder / "summary.json", _WITHOUT):
        facts |= _of_summary(folder, run, rows.last, facts)
    with reading(folder / LAB, _WITHOUT):
        facts["lab"] = _json(folder / LAB) or None

    facts |= {
        "name": run.config.name,
        "origin": origin,
        "config": flat(run.config.model_dump(mode="json")),
        "started": run.started_at,
        "startStep": min(run.start_step, rows.first_step - 1),
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


class Rows:
    """What all rows of metrics say together; each has hundreds of numbers, so `trained` reads those that are shown."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._trained = array("q")
        self.last: Row = {}
        """Of the last trained batch."""
        self.first_step: float = math.inf
        self.evaluated: list[Row] = []
        """What `evaluations` needs of the rows of evaluations."""

        ages: Counter[int] = Counter()
        row: Row = {}

        for place, row in placed_lines(path, dict[str, Any]):
            if "eval/accuracy" in row:
                self.evaluated.append({name: row[name] for name in ("step", "time", "eval/accuracy")})
            if "train/loss" in row:
                self._trained.append(place)
                self.last = row
                self.first_step = min(self.first_step, int(row["step"]))
                ages.update(int(age) for age in row.get("staleness", []))

        self.ended = float(row["time"]) if row else None
        """The time of the last row."""
        self.staleness = {str(age): ages[age] for age in sorted(ages)}
        """Samples by their age."""

    def __len__(self) -> int:
        """How many batches were trained."""
        return len(self._trained)

    def trained(self, most: int) -> Iterable[Row]:
        """The rows of trained batches: at most so many, evenly spread, the last one included."""
        places: Sequence[int] = self._trained
        if len(places) > most:
            places = [places[number] for number in np.linspace(0, len(places) - 1, most).astype(int)]
        return lines_at(self._path, dict[str, Any], places) if places else ()


class Evals:
    """The episodes of `evals.jsonl`, one version's at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
        for place, row in placed_lines(path, dict[str, Any]):
            self._places[row["version"]].append(place)
        self.versions = sorted(self._places)

    def of(self, versions: Iterable[int]) -> list[Row]:
        """In the order in which they ended."""
        places = sorted(place for version in versions for place in self._places.get(version, ()))
        return list(lines_at(self._path, dict[str, Any], places)) if places else []


def _of_rows(rows: Rows, run: RunFile) -> dict[str, Any]:
    """What the rows of metrics say, the books of a run that could not close them included."""
    return {
        "rows": columns(rows.trained(_MOST_ROWS), run),
        "histograms": histograms(rows.trained(_MOST_HISTOGRAMS)),
        "seconds": 0.0 if rows.ended is None else rows.ended - run.started_at,
        "ledger": ledger(rows.last, len(rows), run),
        "staleness": rows.staleness,
    }


def _of_summary(folder: Path, run: RunFile, last: Row, known: dict[str, Any]) -> dict[str, Any]:
    """How it ended, and its books; what is `known` without them stands for what they do not say.

    last: the row of the last trained batch.
    """
    summary = _json(folder / "summary.json")
    broker = summary.get("broker", {})

    return {
        "state": state(folder, run, summary, last),
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


def columns(rows: Iterable[Row], run: RunFile) -> dict[str, list[float | None]]:
    """The columns by name, with an entry for each row; `reward/low` and `reward/high` are the 95 % interval of a
    batch's mean reward."""
    found: dict[str, list[float | None]] = {}
    count = 0
    for count, row in enumerate(rows, 1):
        row["seconds"] = row["time"] - run.started_at
        if rewards := row.get("histogram/reward"):
            row |= reward_interval(rewards, run.config.rollout.group_size)

        for name, value in row.items():
            if not isinstance(value, list):
                column = found.setdefault(name, [])
                column += [None] * (count - 1 - len(column))  # the rows before that did not have it
                column.append(value)
    return {name: column + [None] * (count - len(column)) for name, column in found.items()}


def reward_interval(rewards: Sequence[float], group_size: int) -> Row:
    """The interval of the mean reward by the spread between groups: members of a group share a task and are not
    independent."""
    groups = np.asarray(rewards[: len(rewards) // group_size * group_size], np.float64).reshape(-1, group_size).mean(1)
    if len(groups) < 2:
        return {}
    half = Z95 * float(groups.std(ddof=1)) / math.sqrt(len(groups))
    return {"reward/low": float(groups.mean()) - half, "reward/high": float(groups.mean()) + half}


def histograms(rows: Iterable[Row]) -> dict[str, Any]:
    """The histograms by name: the common edges, and the counts of each row."""
    found: dict[str, Any] = {"steps": []}
    drawn: list[dict[str, np.ndarray]] = []
    for row in rows:
        found["steps"].append(row["step"])
        own = {name: value for name, value in row.items() if name.startswith("histogram/")}
        drawn.append({name: np.asarray(value, np.float64) for name, value in own.items()})

    for name in sorted({name for each in drawn for name in each}):
        values = [each.get(name, np.zeros(0)) for each in drawn]
        edges = np.histogram_bin_edges(np.concatenate(values), _BINS)
        counts = [np.histogram(each, edges)[0].tolist() for each in values]
        found[name.removeprefix("histogram/")] = {"edges": edges.tolist(), "counts": counts}
    return found


def evaluations(rows: Sequence[Row], run: RunFile, evals: Evals) -> list[Row]:
    """The evaluations, each with 95 % intervals over its tasks, as a whole and by held-out set."""
    found = []
    for row in rows:
        episodes = evals.of([row["step"]])
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


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(path.read_bytes()) if path.exists() else {}
    return found
