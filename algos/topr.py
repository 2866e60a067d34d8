"""TOPR: what was better than expected as in supervised learning, the rest only as far as the policy still does it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from algos.registry import register_loss
from algos.types import LossInputs, LossResult, NotNegative, Positive


@dataclass(frozen=True)
class TOPROptions:
    ratio: Literal["sequence", "token"] = "sequence"
    """The ratio of the whole `sequence`, as in the paper, or of each `token`."""
    cap: Positive = 1.0
    """Weights where the advantage is negative are at most this."""


@dataclass(frozen=True)
class WeightedTOPROptions(TOPROptions):
    positive_weight: NotNegative = 1.0
    negative_weight: NotNegative = 1.0


@register_loss("topr", TOPROptions)
def topr(inputs: LossInputs, options: TOPROptions) -> LossResult:
    """A >= 0: -A log pi_current; A < 0: -sg(clip(r, 0, cap)) A log pi_current, r = pi_current / pi_behavior.

    Le Roux et al. 2025, eq. 7 (https://arxiv.org/abs/2503.14286): the tapered ratio bounds what stale bad samples can
    do, and good ones need no ratio at all. r is that of the whole sequence. The paper tapers by the sign of a reward
    of 1 or -1. With graded rewards a positive reward can have a negative advantage, so the advantage decides here.
    """
    return _tapered(inputs, options, 1.0, 1.0)


@register_loss("weighted_topr", WeightedTOPROptions)
def weighted_topr(inputs: LossInputs, options: WeightedTOPROptions) -> LossResult:
    """TOPR with a weight on each of its two parts (ROLL Flash, section 2, https://arxiv.org/abs/2510.11345)."""
    return _tapered(inputs, options, options.positive_weight, options.negative_weight)


def _tapered(inputs: LossInputs, options: TOPROptions, positive: float, negative: float) -> LossResult:
    log_ratio = inputs.log_ratio(inputs.logp_current, inputs.logp_behavior).detach()  # (T,)
    if options.ratio == "sequence":
        log_ratio = inputs.sample_sum(log_ratio)[inputs.sample]
    tapered = log_ratio.clamp(max=0.0 if options.cap == 1 else math.log(options.cap)).exp()
    bad = inputs.advantages < 0  # (T,)
    weight = torch.where(bad, negative * tapered, positive)
    loss = -weight * inputs.advantages * inputs.masked(inputs.logp_current)
    cut = bad & (log_ratio.exp() > options.cap)
    return LossResult(inputs.masked(loss), {"clip_fraction": cut.float(), "good_fraction": (~bad).float()})
