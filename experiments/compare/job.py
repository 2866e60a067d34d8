"""What a trainer is told, and what it tells: nothing here needs more than Python itself."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still be written; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
