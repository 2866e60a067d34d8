"""Rows of supervised training, without torch: where they stand, their order, and what a checkpoint keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec
import numpy as np

FOLDER = "rows"
"""In the folder of the run: `train` and `eval`, as `rl/store/token_rows.py` has them."""
IMITATED = "rl.learner.supervised:imitated"
"""The estimator of supervised training."""


def journal_of(data: Mapping[str, str]) -> bytes:
    """What stands in the place of the broker's journal. data: what the rows are (`envs/data.py`)."""
    return msgspec.msgpack.encode({"data": dict(data)})


def check_journal(journal: bytes, data: Mapping[str, str]) -> None:
    """Raises ValueError for a checkpoint of other rows, or of a run that imitated none."""
    kept = msgspec.msgpack.decode(journal).get("data")
    if kept != dict(data):
        raise ValueError(
            f"it is of other rows ({_named(kept)}), and these are {_named(data)}; begin anew from its model"
        )


def rows_of_batch(rows: int, batch: int, seed: int, step: int) -> list[int]:
    """The rows of batch `step`: epoch after epoch, each in an order of its own."""
    places = range(step * batch, (step + 1) * batch)
    return [int(_order(rows, seed, place // rows)[place % rows]) for place in places]


@lru_cache(maxsize=4)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)


def _named(data: object) -> str:
    return "; ".join(map(str, data.values())) if isinstance(data, Mapping) else "none"
