"""Where two runs part first: in what they began with, then step by step in versions, batches and metrics. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec.structs import asdict

from rl.config.tree import differing
from rl.replay.recorded import Recorded
from rl.wire.messages import BatchPart

_COMPUTED = ("train/", "loss/", "critic/")
"""Metrics that the batch and the weights determine; times and waits are never alike."""


def first_parting(a: Recorded, b: Recorded) -> tuple[int, str] | None:
    """The step that shows it when it is computed again, and what differs; None: what both have is alike. Raises
    Damaged."""
    for n in common_steps(a, b):
        for step, where, found in (
            (n - 1, f"version {n}: version", _versions(n, a, b)),
            (n, f"step {n}:", _batches(n, a, b)),
            (n, f"step {n}: metric", _metrics(n, a, b)),
        ):
            if (first := next(found, None)) is not None:
                return step, f"{where} {first}"
    return None


def common_steps(a: Recorded, b: Recorded) -> list[int]:
    """The steps, and behind the last one its version, of which both have a batch or digests."""
    return sorted({*a.steps, *a.digests} & {*b.steps, *b.digests})


def _versions(n: int, a: Recorded, b: Recorded) -> Iterator[str]:
    left, right = (run.digests.get(n, {}) for run in (a, b))
    others = differing(left, right) if left and right else {}
    for name, values in others.items():
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        yield _told(f"{name}{more}", *(each or "none" for each in values))


def _batches(step: int, a: Recorded, b: Recorded) -> Iterator[str]:
    if step not in a.steps or step not in b.steps:
        return
    left, right = (run.part(step, 0, 1) for run in (a, b))
    ids = [{row.sample_id for row in part.rows} for part in (left, right)]
    for sample in sorted(ids[0] ^ ids[1]):
        run, words = (b, "second") if sample in ids[0] else (a, "first")
        for elsewhere in run.steps:
            if any(row.sample_id == sample for row in run.part(elsewhere, 0, 1).rows):
                yield f"order sample {sample} stands in batch {elsewhere} of the {words} run"
        yield f"sample {sample} is missing in the {words} run"

    for one, other in zip(left.rows, right.rows, strict=True):
        for name, values in differing(asdict(one), asdict(other)).items():
            yield _told(f"row {name} of sample {one.sample_id}", *values)
    yield from _columns(left, right)

    orders = [str([run.part(step, i, len(run.ranks)).members for i in range(len(run.ranks))]) for run in (a, b)]
    if orders[0] != orders[1]:
        yield _told("order samples of the ranks", *orders)


def _columns(left: BatchPart, right: BatchPart) -> Iterator[str]:
    """By the order of the table of columns: what was sampled comes before what is known of it."""
    pairs = {member: [part.of_rows([member]).columns for part in (left, right)] for member in left.members}
    for name in left.columns:
        for member, (columns, others) in pairs.items():
            where = f"column {name} of sample {left.rows[member].sample_id}"
            one, other = columns[name], others.get(name, np.zeros(0))
            if one.shape != other.shape:
                yield _told(where, one.shape, other.shape)
            elif one.tobytes() != other.tobytes():
                places = np.flatnonzero((one != other).reshape(len(one), -1).any(1))
                place = int(places[0]) if len(places) else 0
                yield _told(f"{where}, entry {place}", one[place], other[place])


def _metrics(step: int, a: Recorded, b: Recorded) -> Iterator[str]:
    left, right = (run.metrics.get(step + 1, {}) for run in (a, b))
    for name in left:
        if name.startswith(_COMPUTED) and name in right and left[name] != right[name]:
            yield _told(name, left[name], right[name])


def _told(what: str, left: Any, right: Any) -> str:
    return f"{what}: {left} | {right}"
