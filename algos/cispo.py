"""CISPO: the clipped importance weight multiplies the policy gradient, so no token loses its gradient."""

from __future__ import annotations

from dataclasses import dataclass

from algos.registry import register_loss
from algos.types import LossInputs, LossResult, NotNegative, Share


@dataclass(frozen=True)
class CISPOOptions:
    clip_low: Share = 1.0
    """If this is 1, there is no lower bound, as in the paper."""
    clip_high: NotNegative = 4.0
    """Weights are at most 1 + clip_high."""


@register_loss("cispo", CISPOOptions)
def cispo(inputs: LossInputs, options: CISPOOptions) -> LossResult:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi_current with r = pi_current / pi_behavior.

    MiniMax-M1, eq. 4 and 5 (https://arxiv.org/abs/2506.13585), which tunes the upper bound only; an upper bound of 5 is
    within the flat range of ScaleRL (https://arxiv.org/abs/2510.13786). With clip_low=1 it is `tis` with
    cap = 1 + clip_high.
    """
    ratio = inputs.log_ratio(inputs.logp_current, inputs.logp_behavior).detach().exp()  # (T,)
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    loss = -weight * inputs.advantages * inputs.masked(inputs.logp_current)
    return LossResult(inputs.masked(loss), {"clip_fraction": (weight != ratio).float()})
