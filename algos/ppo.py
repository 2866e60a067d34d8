"""PPO's clipped objective; with group-normalised advantages it is GRPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

from algos.registry import register_loss
from algos.types import LossInputs, LossResult, NotNegative, Share


@dataclass(frozen=True)
class PPOOptions:
    clip_low: Share = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: NotNegative = 0.2
    """0.28 in DAPO ("clip higher", https://arxiv.org/abs/2503.14476)."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """c > 1: bounds the loss of a token with A < 0 by -c A (https://arxiv.org/abs/1912.09729)."""


@register_loss("ppo", PPOOptions)
def ppo(inputs: LossInputs, options: PPOOptions) -> LossResult:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = pi_current / pi_behavior.

    Schulman et al. 2017, eq. 7 (https://arxiv.org/abs/1707.06347). r is taken against the policy that sampled the
    token: against a recomputed one the correction would silently do nothing.
    """
    ratio = inputs.log_ratio(inputs.logp_current, inputs.logp_behavior).exp()
    loss, stopped = clipped(ratio, inputs.advantages, options)
    return LossResult(inputs.masked(loss), {"clip_fraction": stopped.float()})


def clipped(ratio: Tensor, advantages: Tensor, options: PPOOptions) -> tuple[Tensor, Tensor]:
    """The clipped loss and whether the clip stops the token's gradient; all (T,)."""
    plain = -ratio * advantages
    bounded = -ratio.clamp(1 - options.clip_low, 1 + options.clip_high) * advantages
    loss = torch.maximum(plain, bounded)
    stopped = bounded > plain
    if options.dual_clip is not None:
        ceiling = -options.dual_clip * advantages
        beyond = (advantages < 0) & (loss > ceiling)
        loss = torch.where(beyond, ceiling, loss)
        stopped = stopped | beyond
    return loss, stopped


@dataclass(frozen=True)
class DAPOOptions(PPOOptions):
    clip_high: NotNegative = 0.28
    """It is higher than clip_low: rare tokens keep their room to grow."""


# The same function with other bounds, advantages and sums:
register_loss("grpo", PPOOptions)(ppo)  # https://arxiv.org/abs/2402.03300: normalised by group
# https://arxiv.org/abs/2503.14476, eq. 8: DAPO, whose dynamic sampling is `rollout.filter_constant_groups` and whose
# over-long penalty is `algo.shaping: [overlong]`
register_loss("dapo", DAPOOptions)(ppo)
# https://arxiv.org/abs/2503.20783: neither the group's deviation nor the length divides
register_loss("dr_grpo", PPOOptions, advantage="group_mean", aggregation="constant")(ppo)
# REINFORCE++, https://arxiv.org/abs/2501.03262: rewards to go, normalised over the batch
register_loss("reinforce_pp", PPOOptions, advantage="batch")(ppo)
