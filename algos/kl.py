"""Estimators of KL(policy || reference) from the tokens that the policy sampled: k1, k2, k3.

With x = log pi - log pi_reference of a token sampled from pi (http://joschu.net/blog/kl-approx.html):

    k1 = x                 unbiased, of either sign
    k2 = x^2 / 2           biased, never negative
    k3 = exp(-x) - 1 + x   unbiased, never negative
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO_BOUND = 20.0  # e^20 = 5e8: beyond it a token says nothing more, and its gradient would drown the others


def kl_estimate(kind: KLEstimator, logp: Tensor, logp_reference: Tensor) -> Tensor:
    """(T,) estimates, for a penalty in the reward; all arguments (T,)."""
    log_ratio = (logp - logp_reference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio**2 / 2
    exact = log_ratio.double()  # of a small ratio almost nothing is left of e^-x - 1 + x, in float32 rounding alone
    return (torch.expm1(-exact) + exact).to(log_ratio.dtype)


def kl_loss(kind: KLEstimator, logp_current: Tensor, logp_reference: Tensor) -> Tensor:
    """(T,) estimates whose gradient pulls the policy back, for a penalty in the loss.

    The gradient of k1 is that of log pi, whose mean over samples is zero: it would regularise nothing. So k1 has its
    own value and the gradient of k2, x * grad log pi. On-policy that is unbiased for the gradient of the KL
    (https://arxiv.org/abs/2506.09477). The gradient of k3 is its own, (1 - exp(-x)) * grad log pi (GRPO, eq. 4).
    """
    if kind != "k1":
        return kl_estimate(kind, logp_current, logp_reference)
    k2 = kl_estimate("k2", logp_current, logp_reference)
    return kl_estimate("k1", logp_current, logp_reference).detach() + k2 - k2.detach()
