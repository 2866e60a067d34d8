"""What the first step of a replay tells exactly: a gradient, and whose tokens pull it where.

All losses see the same batch from the same weights there. The pull of a token is the derivative of the loss by its
log-probability, which says how strongly the update makes it likelier or less likely.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from rl.learner.credit import all_reduce, gathered
from rl.replay.watch import Watch
from rl.wire.messages import BatchPart, SampleRow

_MOST_REWARDS = 6  # values of a reward that are told one by one


@dataclass
class FirstStep:
    cosine: dict[str, float] = field(default_factory=dict)
    """Of its gradient with those that were computed before, by their name."""
    by_age: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """The share of the whole pull, whatever its sign, by the age of the token."""
    by_reward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    samples: dict[int, float] = field(default_factory=dict)
    """The share of each sample, by its row in the batch; negative where it becomes less likely."""
    tokens: dict[int, list[float]] = field(default_factory=dict)
    """The pull of each loss token of a sample."""


def first_step(watch: Watch, part: BatchPart) -> FirstStep:
    """All ranks call it together, and rank 0 learns of every sample."""
    own = {member: (table["pull"].tolist(), table["age"].long().tolist()) for member, table in watch.tokens.items()}
    told = [msgspec.msgpack.decode(each) for each in gathered(msgspec.msgpack.encode(own))]
    every = dict(sorted((member, found) for each in told for member, found in each.items()))
    total = sum(abs(pull) for pulls, _ in every.values() for pull in pulls) or 1.0

    first = FirstStep()
    name_of = rewards_by_name(part.rows)
    for member, (pulls, ages) in every.items():
        first.tokens[member] = pulls
        first.samples[member] = sum(pulls) / total
        for pull, age in zip(pulls, ages, strict=True):
            first.by_age[str(age)] += abs(pull) / total
            first.by_reward[name_of[member]] += abs(pull) / total
    return first


def rewards_by_name(rows: Sequence[SampleRow]) -> list[str]:
    """The reward of each sample as text; the quarter of the range in which it is, where there are many values."""
    values = np.array([row.reward for row in rows])
    if len(set(values)) <= _MOST_REWARDS:
        return [f"{value:g}" for value in values]
    edges = np.histogram_bin_edges(values, 4)
    return [f"{edges[quarter]:.3g} to {edges[quarter + 1]:.3g}" for quarter in np.digitize(values, edges[1:-1])]


def cosine(one: Tensor, other: Tensor) -> float:
    """Of two gradients over all ranks, which call it together, each with its part as one vector."""
    products = torch.stack([one @ other, one @ one, other @ other]).cpu()
    dot, left, right = all_reduce(products, "sum").tolist()
    return dot / math.sqrt(left * right) if left and right else math.nan
