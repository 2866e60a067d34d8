"""Finished runs as JSON lines, one file for each study."""

from __future__ import annotations

from pathlib import Path

import msgspec

from experiments.arms.study import Cell, Study, StudyError
from experiments.compare.job import read_lines

Won = dict[str, str]
"""What was won, by kind of task, in the order of the tasks: 1 is won, 0 is lost, - has no answer."""


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is kept of one run. The n-th entry of a list is of the n-th training step."""

    arm: str
    seed: int
    how: str = ""
    made_by: str = ""
    machine: str = ""
    date: str = ""
    others: float | None = None
    """The share of the machine that others used meanwhile."""
    cpu_s: float | None = None
    wall_s: float | None = None
    ended: str = ""
    """Why training stopped before its end; empty where it did not."""
    seconds: list[float] = []
    """When the step had been trained, since the command."""
    scores: list[float] = []
    samples: list[int] = []
    """The samples that were trained so far."""
    accuracy: dict[str, float] = {}
    """The accuracy by step, of held-out tasks during training."""
    facts: dict[str, float] = {}
    won: Won = {}

    @property
    def cell(self) -> Cell:
        return Cell(self.arm, self.seed, self.how)


def read(path: Path) -> list[Record]:
    """All whole lines; none without a file."""
    return [msgspec.convert(line, Record) for line in read_lines(path)]


def append(path: Path, record: Record) -> None:
    """Append one line at the end of the file, which is made with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def missing(study: Study, records: list[Record]) -> list[Cell]:
    """The runs of the study that are not there."""
    there = {record.cell for record in records}
    return [cell for cell in study.cells() if cell not in there]


def check_made_by(study: Study, records: list[Record], path: Path) -> None:
    """Raises StudyError if a record was made by another recipe: runs of different ones are never mixed."""
    for record in records:
        known = record.arm in study.every_arm or record.how
        if known and record.made_by != study.made_by(record.cell):
            raise StudyError(
                f"{path}: {record.cell} was made by another recipe or with other overrides; name another folder "
                "with --out, or remove its line to make it again"
            )
