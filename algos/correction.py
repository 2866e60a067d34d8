"""Corrections between the policy that sampled (the engine's, of an older version) and the learner's, for any loss.

They need `logp_proximal`, the learner's log-probabilities at the start of the batch. With r = pi_proximal / pi_behavior
per token, a correction multiplies each token's loss by a weight, takes tokens or samples out of it, or both. Under a
weight the loss itself sees the proximal policy as the one that sampled, so nothing is corrected twice (`ppo` with
`weight: token` is `decoupled_ppo`). Under a mask alone it keeps its own ratio to the policy that did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from algos.registry import Loss
from algos.types import LossInputs, LossResult

Weight = Literal["none", "token", "sequence"]
Mask = Literal["none", "token", "sequence", "geometric"]


@dataclass(frozen=True)
class Correction:
    """Bounds are of ratios; a `sequence` ratio is the product of its tokens', `geometric` their geometric mean.

    Without bounds nothing is cut: the section `algo.correction` has the defaults.
    """

    weight: Weight
    mask: Mask
    cap: float = math.inf
    low: float = 0.0
    high: float = math.inf

    @property
    def active(self) -> bool:
        return self.weight != "none" or self.mask != "none"

    def __call__(self, inputs: LossInputs, loss: Loss) -> LossResult:
        """The loss, corrected. Metrics say what each cut took.

        `weight`: `token` is truncated importance sampling, min(r, cap) (https://fengyao.notion.site/off-policy-rl), and
        `sequence` the same of the whole sequence. Weights are constants for the gradient.
        `mask`: `token` is IcePop, which leaves out tokens with r outside [low, high]
        (https://arxiv.org/abs/2510.18855). `sequence` is masked importance sampling. `geometric` leaves out samples
        whose geometric mean of r is outside [low, high].
        """
        if not self.active:
            return loss(inputs)

        assert inputs.logp_proximal is not None
        log_ratio = inputs.log_ratio(inputs.logp_proximal, inputs.logp_behavior).detach()  # (T,)
        weighted = self.weight != "none"
        result = loss(replace(inputs, logp_behavior=inputs.logp_proximal) if weighted else inputs)
        factor = torch.ones_like(log_ratio)
        metrics = dict(result.metrics)

        if weighted:
            ratio = _level(inputs, log_ratio, self.weight)
            factor = ratio.clamp(max=self.cap)
            metrics |= {"correction_weight": factor, "correction_truncated_fraction": (ratio > self.cap).float()}

        if self.mask != "none":
            ratio = _level(inputs, log_ratio, self.mask)
            kept = (ratio >= self.low) & (ratio <= self.high)
            factor = factor * kept
            metrics["correction_masked_fraction"] = (~kept).float()
        return LossResult(factor * result.per_token, metrics)


def _level(inputs: LossInputs, log_ratio: Tensor, level: str) -> Tensor:
    """(T,) ratios of tokens, of their sequences, or the geometric means of their sequences."""
    if level == "token":
        return log_ratio.exp()
    per_sample = inputs.sample_sum(log_ratio) if level == "sequence" else inputs.sample_mean(log_ratio)
    return per_sample.clamp(-30, 30)[inputs.sample].exp()
