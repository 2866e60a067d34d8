"""DAPO: PPO that clips upwards later; with `algo.aggregation=token`, dynamic sampling and the over-long penalty."""

from __future__ import annotations

from dataclasses import dataclass

from algos.ppo import PPOOptions, ppo
from algos.registry import register_loss
from algos.types import NotNegative


@dataclass(frozen=True)
class DAPOOptions(PPOOptions):
    clip_high: NotNegative = 0.28
    """It is higher than clip_low: rare tokens keep their room to grow."""


# Yu et al. 2025, eq. 8 (https://arxiv.org/abs/2503.14476): PPO with these bounds. Dynamic sampling is
# `rollout.filter_constant_groups`, the over-long penalty `algo.shaping: [overlong]`.
register_loss("dapo", DAPOOptions)(ppo)
