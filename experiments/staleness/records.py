"""Finished runs as JSON lines: written at once, read back as records."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

RECIPE = Path(__file__).with_name("recipe.yaml")
RESULTS = Path(__file__).parents[1] / "results" / "staleness"
FINAL_EVALS = 3
"""Final accuracy is the mean of this many last evaluations: one alone sways by several points from step to step."""


@dataclass(frozen=True)
class Record:
    """One run. `curves` holds one value per trained batch; `setting` says under which recipe it ran."""

    loss: str
    lag: float  # set (in updates), or alpha of the complete system
    seed: int
    system: bool  # the complete asynchronous system instead of the single process
    setting: str
    ended: str  # "finished", or why training stopped early
    cpu_s: float
    evals: dict[str, float]  # held-out greedy accuracy by step
    curves: dict[str, list[float]]

    @property
    def key(self) -> tuple[str, float, int, bool]:
        return self.loss, self.lag, self.seed, self.system

    @property
    def final(self) -> float:
        """Mean held-out accuracy of the last evaluations."""
        last = [self.evals[step] for step in sorted(self.evals, key=int)[-FINAL_EVALS:]]
        return sum(last) / len(last)

    @property
    def early(self) -> float:
        """Held-out accuracy after a third of the evaluations: how fast it learns while the lag builds up."""
        steps = sorted(self.evals, key=int)
        return self.evals[steps[len(steps) // 3]]

    def mean(self, curve: str, begin: float = 0.25) -> float:
        """Mean of a curve after the first `begin` of training, when the lag has reached its full value."""
        values = self.curves[curve][int(begin * len(self.curves[curve])) :]
        return sum(values) / max(1, len(values))


def setting() -> str:
    """Eight hex digits that change with the recipe: runs of different settings are never compared."""
    return hashlib.sha256(RECIPE.read_bytes()).hexdigest()[:8]


def read(path: Path) -> list[Record]:
    """The records of the present setting."""
    if not path.exists():
        return []
    records = [Record(**json.loads(line)) for line in path.read_text().splitlines()]
    return [record for record in records if record.setting == setting()]


def append(path: Path, record: Record) -> None:
    """One line at the end of the file, which is made with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")
