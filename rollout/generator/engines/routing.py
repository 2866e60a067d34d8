"""The column `routed_experts` of one answer, from what an engine tells of the positions that it has read."""

from __future__ import annotations

import numpy as np

from rl.wire.columns import Column
from rl.wire.messages import Generate
from rollout.generator.engines.base import Sampled


def first_position(request: Generate) -> int:
    """The first position whose routing is asked for. It predicted the first token that has no entry yet."""
    return max(request.known - 1, 0)


def set_routing(sampled: Sampled, request: Generate, column: Column, rows: np.ndarray | None) -> None:
    """rows: (positions, layers, k) from `first_position` on, of all positions but the last one; None: nobody told.

    An entry stands at the token that its position predicted; the first token of a sequence has none. Where rows are too
    few, as of a request that was aborted, the prompt has no entries: whoever goes on with it reads it again.
    """
    new = len(sampled.token_ids)
    context = len(request.prompt_ids) - request.known
    if rows is not None and request.known == 0:
        rows = np.concatenate([column.full(1), rows])
    if rows is None or len(rows) < context + new:
        sampled.columns[column.name] = column.full(new)
        return

    sampled.context[column.name] = rows[:context]
    sampled.columns[column.name] = rows[context : context + new]
