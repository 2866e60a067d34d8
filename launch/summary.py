"""`summary.json`: what a run did, from the closing reports of broker and learner and the supervisor's clock."""

from __future__ import annotations

import json
import time
from typing import Any

from launch.children import Child
from rl.core.run import RunFile


class Observed:
    """What the supervisor saw itself: wall-clock marks, the last rows, and time spent by process."""

    def __init__(self, started_at: float, start_step: int) -> None:
        self.started_at = started_at
        self.start_step = start_step
        self.step = start_step
        self.first_update_s: float | None = None
        self.last_row: dict[str, float] = {}
        self.evals: list[tuple[int, float]] = []
        self._idle = 0.0  # of generators that have died
        self._alive = 0.0
        self._generators: dict[tuple[int, int], tuple[float, float]] = {}

    def add(self, step: int, values: dict[str, float]) -> None:
        if "eval/accuracy" in values:
            self.evals.append((step, values["eval/accuracy"]))
        if "train/loss" in values:
            self.step = step
            self.last_row = values
            if self.first_update_s is None:
                self.first_update_s = time.time() - self.started_at

    def step_values(self, step: int, children: dict[tuple[str, int], Child]) -> dict[str, float]:
        """Columns that only the supervisor knows: who waited for whom, queue depths, idle generators."""
        values: dict[str, float] = {"time/elapsed": time.time() - self.started_at}
        for child in children.values():
            prefix = child.name
            values |= {f"wait/{prefix}/{whom}": seconds for whom, seconds in child.waits.items()}
            values |= {f"{prefix}/{key}": value for key, value in child.stats.items()}
        values["generator_idle_fraction"] = self.idle_fraction(children)
        return values

    def bury(self, child: Child) -> None:
        """Keep the idle time of a generator that is being replaced."""
        if child.spec.role == "generator":
            self._idle += child.stats.get("idle_s", 0.0)
            self._alive += child.stats.get("idle_s", 0.0) + child.stats.get("busy_s", 0.0)

    def idle_fraction(self, children: dict[tuple[str, int], Child]) -> float:
        idle, alive = self._idle, self._alive
        for (role, _index), child in children.items():
            if role == "generator":
                idle += child.stats.get("idle_s", 0.0)
                alive += child.stats.get("idle_s", 0.0) + child.stats.get("busy_s", 0.0)
        return idle / alive if alive else 0.0


BROKER_KEYS = ("ledger_closed", "kept", "issued", "cut", "kept_against_cut", "hedged", "hedges_won", "quarantines")


def build_summary(
    run: RunFile, reports: dict[str, bytes], observed: Observed, error: str, idle_fraction: float
) -> dict[str, Any]:
    """The keys that every run's summary has; a run that failed has what it got to, and `error`."""
    broker: dict[str, Any] = json.loads(reports.get("broker") or b"{}")
    learner: dict[str, Any] = json.loads(reports.get("learner") or b"{}")
    seconds = time.time() - run.started_at
    accuracies = [accuracy for _step, accuracy in observed.evals]
    trained = broker.get("ledger", {}).get("tokens", {}).get("trained", 0)
    training_s = learner.get("seconds", seconds)
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
        "generator_idle_fraction": idle_fraction,
        "weight_sync": learner.get("weight_sync"),
        "broker": {key: broker[key] for key in BROKER_KEYS if key in broker},
    }
    return summary | ({"error": error} if error else {})
