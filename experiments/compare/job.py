"""What a trainer is told, and what it tells: nothing here needs more than Python itself."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WINDOW = 5
"""Steps whose mean accuracy is compared with a target."""


@dataclass(frozen=True)
class Job:
    """One training run. Paths are absolute."""

    folder: Path
    """The folder of this run alone; not there yet."""
    model: Path
    """The start model, as transformers and vLLM read it."""
    questions: Path
    """JSON lines of `question` and `answer`, in the order in which they are trained; none comes twice."""
    seed: int
    lr: float
    steps: int
    """The most steps; whoever started the run ends it when it has seen enough."""
    groups: int
    """Questions in one training step."""
    group_size: int
    """Answers to each question."""
    max_tokens: int
    """The most tokens of an answer."""
    rows_at_once: int
    """Samples in one forward pass, where a trainer pads them to one length."""
    device: str = "cpu"
    repeats: int = 1
    """So often the start model is trained, one time behind the other, in an engine that starts once."""
    target: float = math.inf
    """The accuracy at which a repeat ends."""
    patience_s: float = math.inf
    """The seconds after which it ends, too."""

    @property
    def longest(self) -> int:
        """Tokens of a question with its answer, at most."""
        return self.max_tokens + 32

    def save(self, path: Path) -> None:
        values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        path.write_text(json.dumps(values))

    @classmethod
    def load(cls, path: Path) -> Job:
        values = json.loads(path.read_text())
        paths = {name: Path(values[name]) for name in ("folder", "model", "questions")}
        return cls(**(values | paths))


@dataclass(frozen=True)
class Row:
    """One training step."""

    time: float
    """When it had ended, in seconds of Unix time."""
    accuracy: float
    """The accuracy of its samples."""
    tokens: int
    """The tokens generated in it."""
    parts: dict[str, float] = field(default_factory=dict)
    """Where its seconds went, by the trainer's own names."""
    repeat: int = 0


def reached_at(accuracies: Sequence[float], target: float) -> int | None:
    """The first step, counted from 1, at which the mean of the last five is at least the target."""
    for step in range(WINDOW, len(accuracies) + 1):
        if statistics.fmean(accuracies[step - WINDOW : step]) >= target:
            return step
    return None


def has_ended(job: Job, rows: Sequence[Row]) -> bool:
    """Whether a repeat with these rows is over; its seconds count from when its first batch was there."""
    if not rows:
        return False
    reached = reached_at([row.accuracy for row in rows], job.target) is not None
    return reached or rows[-1].time - began(rows) > job.patience_s or len(rows) >= job.steps


def began(rows: Sequence[Row]) -> float:
    """When the first batch of a repeat was there; before that its engine may still have started."""
    return rows[0].time - sum(seconds for name, seconds in rows[0].parts.items() if name not in ("wait", "generate"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still be written; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
