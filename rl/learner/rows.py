"""Rows of supervised training, without torch: where they stand, their order, and what a checkpoint keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec
import numpy as np

from rl.config.schema import Config

FOLDER = "rows"
"""In the folder of the run: `train` and `eval`, as `rl/store/token_rows.py` has them."""
IMITATED = "rl.learner.supervised:imitated"
"""The estimator of supervised training."""


def journal_of(data: Mapping[str, str], config: Config) -> bytes:
    """What stands in the place of the broker's journal. data: what the rows are (`envs/data.py`)."""
    return msgspec.msgpack.encode({"data": dict(data), "order": _decides(config)})


def check_journal(journal: bytes, data: Mapping[str, str], config: Config) -> None:
    """Raises ValueError for a checkpoint of other rows, of another order, or of a run that imitated none."""
    kept = msgspec.msgpack.decode(journal)
    if kept.get("data") != dict(data):
        raise ValueError(
            f"it is of other rows ({_named(kept.get('data'))}), and these are {_named(data)}; begin anew from its model"
        )
    for field, value in _decides(config).items():
        if (was := kept["order"][field]) != value:
            raise ValueError(
                f"it was trained with {field}={was}, and {value} makes other batches of the rows, of which some would "
                "be learned twice and some never; set it so, or begin anew from its model"
            )


def _decides(config: Config) -> dict[str, int]:
    """The fields by which batch n has its rows."""
    return {
        "seed": config.seed,
        "rollout.groups_per_batch": config.rollout.groups_per_batch,
        "generator.max_model_len": config.generator.max_model_len,
    }


def rows_of_batch(rows: int, batch: int, seed: int, step: int) -> list[int]:
    """The rows of batch `step`: epoch after epoch, each in an order of its own."""
    places = range(step * batch, (step + 1) * batch)
    return [int(_order(rows, seed, place // rows)[place % rows]) for place in places]


@lru_cache(maxsize=4)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)


def _named(data: object) -> str:
    return "; ".join(map(str, data.values())) if isinstance(data, Mapping) else "none"
