"""REINFORCE: the policy gradient without any correction for stale data."""

from __future__ import annotations

from algos.registry import NoOptions, register_loss
from algos.types import LossInputs, LossResult


@register_loss("reinforce")
def reinforce(inputs: LossInputs, options: NoOptions) -> LossResult:
    """-A log pi_current (Williams 1992, https://doi.org/10.1007/BF00992696)."""
    return LossResult(inputs.masked(-inputs.advantages * inputs.masked(inputs.logp_current)))


# RLOO (Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740): REINFORCE on leave-one-out advantages.
register_loss("rloo", advantage="leave_one_out")(reinforce)
