"""`summary.json`: what a run did, from the closing reports of broker and learner and the supervisor's clock."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from launch.children import Child
from rl.observe.alarms import RaisedAlarm
from rl.observe.trace_events import Wait
from rl.wire.run import RunFile

_SUMMARY_BYTES = 1 << 18  # some times what one takes
Children = dict[tuple[str, int], Child]
"""The living processes by role and index."""
BROKER_KEYS = (
    "ledger_closed",
    "kept",
    "issued",
    "cut",
    "kept_against_cut",
    "useful_share",
    "hedged",
    "hedges_won",
    "hooks",
    "refused_trajectories",
)


@dataclass
class Observed:
    """What the supervisor saw itself: wall-clock marks, evaluations, and how long generators had nothing to do."""

    started_at: float
    step: int
    first_update_s: float | None = None
    evals: list[tuple[int, float]] = field(default_factory=list)
    alarms: dict[str, RaisedAlarm] = field(default_factory=dict)  # by name
    before_s: float = 0.0
    """Seconds of the sittings before."""
    waits: dict[str, Wait] = field(default_factory=dict)
    """The longest wait of each process, over its incarnations."""
    trained: tuple[float, int] = (-1.0, -1)
    """Timeline and step of the newest row of a trained batch."""
    _dead_generators: list[dict[str, float]] = field(default_factory=list)

    def go_on(self, history: Iterable[dict[str, Any]]) -> None:
        """Take up the rows of the sittings before."""
        for row in history:
            self.before_s = row.get("time/elapsed", self.before_s)
            if "eval/accuracy" in row:
                self.evals.append((row["step"], row["eval/accuracy"]))

    def take_over(self, history: list[dict[str, Any]], alarms: list[RaisedAlarm], now: float) -> None:
        """Take up what another supervisor of this run has seen. Time without one does not count."""
        self.go_on(history)
        trained = [row for row in history if "train/loss" in row and row["step"] > self.step]
        if trained:
            self.first_update_s = trained[0]["time"] - self.started_at
            self.trained = max((row["version/timeline"], row["step"]) for row in trained)
            self.step = self.trained[1]
        self.alarms = {alarm.name: alarm for alarm in alarms}
        self.started_at = now

    def is_news(self, step: int, values: dict[str, float]) -> bool:
        """Whether this batch was not trained before. After a death the learner trains those since its checkpoint again,
        and unless it begins a new timeline, everything comes out as it was.
        """
        before = self.trained
        self.trained = max(before, (values["version/timeline"], step))
        return self.trained > before

    def add(self, step: int, values: dict[str, float]) -> None:
        """A row of metrics."""
        if "eval/accuracy" in values:
            self.evals.append((step, values["eval/accuracy"]))
        if "train/loss" in values:
            self.step = step
            if self.first_update_s is None:
                self.first_update_s = time.time() - self.started_at

    def step_values(self, children: Children) -> dict[str, float]:
        """Columns that only the supervisor knows: who waited for whom, queue depths, idle generators."""
        values: dict[str, float] = {"time/elapsed": self.before_s + time.time() - self.started_at}
        for child in children.values():
            values |= {f"wait/{child.name}/{whom}": seconds for whom, seconds in child.beat.waits.items()}
            values |= {f"{child.name}/{key}": value for key, value in child.beat.stats.items()}

        values["generator_idle_fraction"] = self.idle_fraction(children)
        return values

    def waited(self, name: str, longest: Wait) -> None:
        """A heartbeat's longest wait; where the process knows no steps, it is of the step that is being made."""
        if longest.seconds > self.waits.get(name, Wait()).seconds:
            self.waits[name] = longest if longest.step > 0 else msgspec.structs.replace(longest, step=self.step + 1)

    def longest_wait(self, role: str = "") -> tuple[str, Wait] | None:
        """That of all processes, or of one role, and whose it was."""
        own = [each for each in self.waits.items() if each[0].startswith(role)]
        return max(own, key=lambda each: each[1].seconds, default=None)

    def child_died(self, child: Child) -> None:
        """Keep the idle time of a generator that is being replaced."""
        if child.spec.role == "generator":
            self._dead_generators.append(child.beat.stats)

    def idle_fraction(self, children: Children) -> float:
        """Share of the generators' seconds without work, those that died included; 0 before the first heartbeat."""
        alive = [child.beat.stats for child in children.values() if child.spec.role == "generator"]
        every = [*self._dead_generators, *alive]
        idle_s = sum(stats.get("idle_s", 0.0) for stats in every)
        busy_s = sum(stats.get("busy_s", 0.0) for stats in every)
        return idle_s / (idle_s + busy_s) if idle_s + busy_s else 0.0


def told_wait(name: str, wait: Wait) -> str:
    return f"{name} for {wait.whom}, {wait.seconds:.1f} s in step {wait.step}"


def build_summary(
    run: RunFile, reports: dict[str, bytes], observed: Observed, error: str, children: Children
) -> dict[str, Any]:
    """The keys that every run's summary has; a run that failed has what it got to, and `error`."""
    broker: dict[str, Any] = json.loads(reports.get("broker") or b"{}")
    learner: dict[str, Any] = json.loads(reports.get("learner") or b"{}")
    seconds = time.time() - run.started_at
    accuracies = [accuracy for _step, accuracy in observed.evals]
    trained = broker.get("ledger", {}).get("tokens", {}).get("trained", 0)
    training_s = learner.get("seconds", seconds)
    longest = observed.longest_wait()

    summary = {
        "name": run.config.name,
        "start_step": run.start_step,
        "steps": observed.step - run.start_step,
        "seconds": round(seconds, 3),
        "seconds_to_first_update": observed.first_update_s,
        "alpha": run.config.rollout.alpha,
        "freshness_violations": broker.get("freshness_violations"),
        "staleness": broker.get("staleness"),
        "ledger": broker.get("ledger"),
        "eval": {"first": accuracies[0], "last": accuracies[-1]} if accuracies else None,
        "reward": broker.get("reward"),
        "useful_tokens_per_second": trained / training_s if training_s else 0.0,
        "kept_over_issued_length": broker.get("kept_over_issued_length"),
        "learner_wait_fraction": learner.get("wait_fraction"),
        "generator_idle_fraction": observed.idle_fraction(children),
        "longest_wait": longest and {"process": longest[0], **msgspec.structs.asdict(longest[1])},
        "weight_sync": learner.get("weight_sync"),
        "alarms": {name: f"{each.when}, {each.who}: {each.detail}" for name, each in observed.alarms.items()},
        "broker": {key: broker[key] for key in BROKER_KEYS if key in broker},
    }
    summary |= {key: learner[key] for key in ("held_out_loss",) if key in learner}  # of supervised training
    return summary | ({"error": error} if error else {})


def reserve_summary(path: Path) -> None:
    """Take room for it now: a disk that is full at the end still has the summary. Raises OSError."""
    with path.with_suffix(".part").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _SUMMARY_BYTES)


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Valid JSON whatever the numbers are: one that is not finite becomes null. Raises OSError; then there is none."""
    partial = path.with_suffix(".part")
    with partial.open("r+b" if partial.exists() else "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        file.truncate()
    partial.replace(path)
