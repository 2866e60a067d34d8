"""Advantages from the rewards of a whole batch: (rewards (N,), group (N,) int64) -> (N,) float32.

Computed in float64 and exactly 0 for a constant group or one of a single member, however its mean is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from algos.registry import register_advantage

STD_FLOOR = 1e-6


@register_advantage("group")
def group_normalised(rewards: Tensor, group: Tensor) -> Tensor:
    """(r - mean) / std within the group, population std: GRPO, eq. 3 (https://arxiv.org/abs/2402.03300)."""
    centred, index, count = _centre(rewards, group)
    variance = torch.zeros_like(count).index_add_(0, index, centred**2) / count
    return (centred / (variance.sqrt()[index] + STD_FLOOR)).float()


@register_advantage("group_mean")
def group_centred(rewards: Tensor, group: Tensor) -> Tensor:
    """r - mean of the group: Dr. GRPO, no bias towards groups of little spread (https://arxiv.org/abs/2503.20783)."""
    return _centre(rewards, group)[0].float()


def _centre(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(r - group mean (N,), index of the group (N,), members of each group (groups,)), float64."""
    rewards = rewards.double()
    unique, index = group.unique(return_inverse=True)
    blank = rewards.new_zeros(len(unique))
    count = blank.index_add(0, index, torch.ones_like(rewards))
    mean = blank.index_add(0, index, rewards) / count
    low = blank.scatter_reduce(0, index, rewards, "amin", include_self=False)
    high = blank.scatter_reduce(0, index, rewards, "amax", include_self=False)
    centred = torch.where((low == high)[index], torch.zeros_like(rewards), rewards - mean[index])
    return centred, index, count
