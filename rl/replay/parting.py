"""Where two runs part first: in what they began with, then step by step in versions, batches and metrics. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from msgspec.structs import asdict

from rl.config.tree import differing
from rl.replay.recorded import Recorded
from rl.wire.messages import BatchPart

_COMPUTED = ("train/", "loss/", "critic/")
"""Metrics that the batch and the weights determine; times and waits are never alike."""


@dataclass(frozen=True)
class Parting:
    step: int
    kind: str
    """version, order, sample, row, column or metric."""
    name: str
    left: str = ""
    right: str = ""

    def __str__(self) -> str:
        where = f"version {self.step}" if self.kind == "version" else f"step {self.step}"
        return f"{where}: {self.kind} {self.name}" + (f": {self.left} | {self.right}" if self.left else "")


def first_parting(a: Recorded, b: Recorded) -> Parting | None:
    """None: what both have is alike. Raises Damaged."""
    for n in common_steps(a, b):
        for found in (_versions(n, a, b), _batches(n, a, b), _metrics(n, a, b)):
            if (first := next(found, None)) is not None:
                return first
    return None


def common_steps(a: Recorded, b: Recorded) -> list[int]:
    """The steps, and behind the last one its version, of which both have a batch or digests."""
    return sorted({*a.steps, *a.digests} & {*b.steps, *b.digests})


def _versions(n: int, a: Recorded, b: Recorded) -> Iterator[Parting]:
    left = a.digests.get(n, {})
    right = b.digests.get(n, {})
    others = differing(left, right) if left and right else {}
    for name, values in others.items():
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        yield Parting(n, "version", f"{name}{more}", *(each or "none" for each in values))


def _batches(step: int, a: Recorded, b: Recorded) -> Iterator[Parting]:
    if step not in a.steps or step not in b.steps:
        return
    left = a.part(step, 0, 1)
    right = b.part(step, 0, 1)
    ids = [{row.sample_id for row in part.rows} for part in (left, right)]
    for sample in sorted(ids[0] ^ ids[1]):
        run, words = (b, "second") if sample in ids[0] else (a, "first")
        for elsewhere in run.steps:
            if any(row.sample_id == sample for row in run.part(elsewhere, 0, 1).rows):
                yield Parting(step, "order", f"sample {sample} stands in batch {elsewhere} of the {words} run")
        yield Parting(step, "sample", f"{sample} is missing in the {words} run")

    yield from _rows(step, left, right)
    yield from _columns(step, left, right)

    orders = [str([run.part(step, i, len(run.ranks)).members for i in range(len(run.ranks))]) for run in (a, b)]
    if orders[0] != orders[1]:
        yield Parting(step, "order", "samples of the ranks", *orders)


def _rows(step: int, left: BatchPart, right: BatchPart) -> Iterator[Parting]:
    for one, other in zip(left.rows, right.rows, strict=True):
        for name, values in differing(asdict(one), asdict(other)).items():
            yield Parting(step, "row", f"{name} of sample {one.sample_id}", *map(str, values))


def _columns(step: int, left: BatchPart, right: BatchPart) -> Iterator[Parting]:
    """By the order of the table of columns: what was sampled comes before what is known of it."""
    pairs = {
        member: [part.of_rows([member]).columns for part in (left, right)] for member in dict.fromkeys(left.members)
    }

    for name in left.columns:
        for member, (one, other) in pairs.items():
            values = [one[name], other.get(name, np.zeros(0))]
            if values[0].shape != values[1].shape:
                shapes = [str(each.shape) for each in values]
                yield Parting(step, "column", f"{name} of sample {left.rows[member].sample_id}", *shapes)
            elif values[0].tobytes() != values[1].tobytes():
                places = np.flatnonzero((values[0] != values[1]).reshape(len(values[0]), -1).any(1))
                place = int(places[0]) if len(places) else 0
                where = f"{name} of sample {left.rows[member].sample_id}, entry {place}"
                yield Parting(step, "column", where, *(str(each[place]) for each in values))


def _metrics(step: int, a: Recorded, b: Recorded) -> Iterator[Parting]:
    left = a.metrics.get(step + 1, {})
    right = b.metrics.get(step + 1, {})
    for name in left:
        if name.startswith(_COMPUTED) and name in right and left[name] != right[name]:
            yield Parting(step, "metric", name, str(left[name]), str(right[name]))
