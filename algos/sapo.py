"""SAPO: a smooth gate in place of the clip; the gradient fades as the ratio leaves 1, faster for A < 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from algos.registry import register_loss
from algos.types import LossInputs, LossResult, Positive


@dataclass(frozen=True)
class SAPOOptions:
    tau_positive: Positive = 1.0
    """Steepness of the gate where A > 0."""
    tau_negative: Positive = 1.05
    """The steepness elsewhere: it is higher, because pushing a token down raises many others."""


@register_loss("sapo", SAPOOptions, aggregation="sequence")
def sapo(inputs: LossInputs, options: SAPOOptions) -> LossResult:
    """-(4 / tau) sigmoid(tau (r - 1)) A with r = pi_current / pi_behavior and tau by the sign of A.

    Gao et al. 2025, eq. 5 and 6 (https://arxiv.org/abs/2511.20347). At r = 1 the gradient is that of REINFORCE, and
    4 sigmoid' <= 1 bounds it.
    """
    ratio = inputs.log_ratio(inputs.logp_current, inputs.logp_behavior).exp()  # (T,)
    tau = torch.full_like(ratio, options.tau_negative).masked_fill(inputs.advantages > 0, options.tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1))
    weight = 4 * gate * (1 - gate)  # of the gradient, relative to r A grad log pi
    return LossResult(inputs.masked(-4 / tau * gate * inputs.advantages), {"gate": weight.detach()})
