"""Columns of sequences that no generator has made, for the plain loop, benches and tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl.wire.columns import declared


def token_columns(token_ids: Any, loss_mask: Any, **generated: Any) -> dict[str, np.ndarray]:
    """The built-in columns of a sequence in their dtypes, from arrays, lists or single numbers.

    token_ids, loss_mask (T,); of `generated`, values count where the mask is set and the masked value stands elsewhere.
    Raises ValueError for a name that is not in the table.
    """
    mask = np.asarray(loss_mask, np.uint8)
    made: dict[str, np.ndarray] = {"token_ids": np.asarray(token_ids, np.int32), "loss_mask": mask}
    for name in ("logp_behavior", "policy_version", *generated):
        column = declared(name)
        made[name] = np.where(mask, generated.get(name, column.masked), column.masked).astype(column.dtype)
    return made
