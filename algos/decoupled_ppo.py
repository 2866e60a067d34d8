"""Decoupled PPO: the trust region around a recent policy, the correction against the one that sampled."""

from __future__ import annotations

from dataclasses import dataclass

from algos.ppo import PPOOptions, clipped
from algos.registry import register_loss
from algos.types import LossInputs, LossResult


@dataclass(frozen=True)
class DecoupledPPOOptions(PPOOptions):
    cap: float = 5.0
    """Behaviour weights above it count as this much."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cap <= 0:
            raise ValueError(f"cap={self.cap} must be positive")


@register_loss("decoupled_ppo", DecoupledPPOOptions, needs_proximal=True)
def decoupled_ppo(inputs: LossInputs, options: DecoupledPPOOptions) -> LossResult:
    """sg(min(pi_proximal / pi_behavior, cap)) * PPO(r = pi_current / pi_proximal).

    Hilton et al. 2022 (https://arxiv.org/abs/2110.00641); for asynchronous RL AReaL, eq. 5
    (https://arxiv.org/abs/2505.24298). The anchor is the policy at the start of the batch.
    """
    assert inputs.logp_proximal is not None
    weight = inputs.log_ratio(inputs.logp_proximal, inputs.logp_behavior).exp().detach()  # (T,)
    ratio = inputs.log_ratio(inputs.logp_current, inputs.logp_proximal).exp()  # (T,)
    loss, stopped = clipped(ratio, inputs.advantages, options)
    metrics = {"clip_fraction": stopped.float(), "cap_fraction": (weight > options.cap).float()}
    return LossResult(inputs.masked(weight.clamp(max=options.cap) * loss), metrics)
