"""On-policy distillation: the student samples, and a teacher says of each token how likely it would have been."""

from __future__ import annotations

from dataclasses import dataclass

from algos.registry import register_loss
from algos.types import LossInputs, LossResult, NotNegative, Positive


@dataclass(frozen=True)
class ReverseKLOptions:
    rewards: NotNegative = 0.0
    """Weight of the advantage that rewards give, beside the teacher's; 0: the teacher alone."""
    cap: Positive = 2.0
    """Largest importance weight of a token that an older policy has sampled."""


@register_loss("reverse_kl", ReverseKLOptions)
def reverse_kl(inputs: LossInputs, options: ReverseKLOptions) -> LossResult:
    """-sg(min(r, C) (log pi_teacher - log pi_current + w A)) log pi_current with r = pi_current / pi_behavior.

    Each token's advantage is how much likelier it is to the teacher, as in "On-Policy Distillation" (Thinking Machines
    2025, https://thinkingmachines.ai/blog/on-policy-distillation). That is the gradient of KL(pi || pi_teacher) of the
    next token, with no regard to later ones. It is GKD with lambda = 1 and reverse KL
    (https://arxiv.org/abs/2306.13649), from sampled tokens. sg: stop gradient; C is `cap`, w is `rewards`.
    """
    current = inputs.masked(inputs.logp_current)
    gap = inputs.log_ratio(inputs.columns["teacher_logp"], current.detach())  # (T,)
    ratio = inputs.log_ratio(current, inputs.logp_behavior).detach().exp()
    signal = gap + options.rewards * inputs.masked(inputs.advantages)
    loss = -ratio.clamp(max=options.cap) * signal * current
    return LossResult(inputs.masked(loss), {"reverse_kl": -gap, "clip_fraction": (ratio > options.cap).float()})
