"""Kimi's online policy mirror descent: the policy gradient, held near the policy that sampled by a square."""

from __future__ import annotations

from dataclasses import dataclass

from algos.registry import register_loss
from algos.types import LossInputs, LossResult, NotNegative


@dataclass(frozen=True)
class KimiOptions:
    tau: NotNegative = 0.1
    """Strength of the square."""


@register_loss("kimi", KimiOptions)
def kimi(inputs: LossInputs, options: KimiOptions) -> LossResult:
    """-A log pi_current + (tau / 2) (log pi_current - log pi_behavior)^2, per token.

    Kimi k1.5, eq. 3 (https://arxiv.org/abs/2501.12599; the group's mean reward stands for tau log Z), in the
    token-level form of ROLL Flash (https://arxiv.org/abs/2510.11345). Samples of any age are legal: no ratio appears.
    """
    log_ratio = inputs.log_ratio(inputs.logp_current, inputs.logp_behavior)  # (T,)
    square = options.tau / 2 * log_ratio**2
    loss = -inputs.advantages * inputs.masked(inputs.logp_current) + square
    return LossResult(inputs.masked(loss), {"square": inputs.masked(square.detach())})
