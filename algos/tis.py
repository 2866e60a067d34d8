"""Truncated importance sampling: the off-policy gradient, with the weight of one token bounded."""

from __future__ import annotations

from dataclasses import dataclass

from algos.registry import register_loss
from algos.types import LossInputs, LossResult, Positive


@dataclass(frozen=True)
class TISOptions:
    cap: Positive = 2.0
    """C: weights above it count as C."""


@register_loss("tis", TISOptions)
def tis(inputs: LossInputs, options: TISOptions) -> LossResult:
    """-sg(min(r, C)) A log pi_current with r = pi_current / pi_behavior, sg = stop gradient.

    Ionides 2008 (https://doi.org/10.1198/106186008X320456); IMPALA's rho-bar (https://arxiv.org/abs/1802.01561).
    """
    ratio = inputs.log_ratio(inputs.logp_current, inputs.logp_behavior).detach().exp()  # (T,)
    weight = ratio.clamp(max=options.cap)
    loss = -weight * inputs.advantages * inputs.masked(inputs.logp_current)
    return LossResult(inputs.masked(loss), {"clip_fraction": (ratio > options.cap).float()})


@dataclass(frozen=True)
class AIPOOptions(TISOptions):
    cap: Positive = 4.0
    """rho; the paper uses 2 to 10."""


# LlamaRL's AIPO, eq. 3 (https://arxiv.org/abs/2505.24034): TIS with a wider cap.
register_loss("aipo", AIPOOptions)(tis)
