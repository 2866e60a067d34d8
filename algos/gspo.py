"""GSPO: PPO's clip on whole sequences, with the length-normalised sequence ratio."""

from __future__ import annotations

from dataclasses import dataclass

from algos.ppo import PPOOptions, clipped
from algos.registry import register_loss
from algos.types import LossInputs, LossResult, NotNegative, Share


@dataclass(frozen=True)
class GSPOOptions(PPOOptions):
    clip_low: Share = 3e-4
    """The geometric mean of a sequence's ratios stays within [1 - clip_low, 1 + clip_high]."""
    clip_high: NotNegative = 4e-4


@register_loss("gspo", GSPOOptions, aggregation="sequence")
def gspo(inputs: LossInputs, options: GSPOOptions) -> LossResult:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = (pi_current / pi_behavior)^(1/length) of a sequence.

    The source is Zheng et al. 2025, eq. 5 and 7, with the bounds of section 5.1 (https://arxiv.org/abs/2507.18071). The
    form is GSPO-token (eq. 13 and 14). Where a sequence has one advantage, its value and gradient are the same; where
    it has several, it takes each token's own. The mean over sequences is `algo.aggregation: sequence`, this loss's
    default.

    In bfloat16 an engine's log-probabilities differ from the learner's by more than these bounds: there it wants
    `algo.correction.weight: token`, which makes the learner's own old policy pi_behavior.
    """
    mean = inputs.sample_mean(inputs.log_ratio(inputs.logp_current, inputs.logp_behavior))[inputs.sample]  # (T,)
    own = inputs.masked(inputs.logp_current)
    ratio = (mean.detach() + own - own.detach()).exp()
    loss, stopped = clipped(ratio, inputs.advantages, options)
    return LossResult(inputs.masked(loss), {"clip_fraction": stopped.float()})
