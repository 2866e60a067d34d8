"""Decoupled PPO: the trust region around a recent policy, the correction against the one that sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from algos.ppo import PPOOptions, clipped
from algos.registry import register_loss
from algos.types import LossInputs, LossResult, Positive


@dataclass(frozen=True)
class DecoupledPPOOptions(PPOOptions):
    cap: Positive = 5.0
    """Behaviour weights above it count as this much."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """`recomputed`: one more forward per batch. `interpolated`: between behaviour and current policy, for free."""


@register_loss("decoupled_ppo", DecoupledPPOOptions, needs_proximal=lambda options: options.proximal == "recomputed")
def decoupled_ppo(inputs: LossInputs, options: DecoupledPPOOptions) -> LossResult:
    """sg(min(pi_proximal / pi_behavior, cap)) * PPO(r = pi_current / pi_proximal).

    Hilton et al. 2022 (https://arxiv.org/abs/2110.00641); for asynchronous RL AReaL, eq. 5
    (https://arxiv.org/abs/2505.24298). The anchor is the policy at the start of the batch.
    """
    proximal = interpolated(inputs) if options.proximal == "interpolated" else inputs.logp_proximal
    assert proximal is not None
    weight = inputs.log_ratio(proximal, inputs.logp_behavior).exp().detach()  # (T,)
    ratio = inputs.log_ratio(inputs.logp_current, proximal).exp()  # (T,)
    loss, stopped = clipped(ratio, inputs.advantages, options)
    metrics = {"clip_fraction": stopped.float(), "cap_fraction": (weight > options.cap).float()}
    return LossResult(inputs.masked(weight.clamp(max=options.cap) * loss), metrics)


def interpolated(inputs: LossInputs) -> Tensor:
    """(T,) log pi_proximal between behaviour and current policy on the line of versions.

    At staleness d the batch starts from version v + d and trains version v + d + 1, so the anchor is d / (d + 1) of
    the way: AReaL's log-linear approximation (https://inclusionai.github.io/AReaL/algorithms/prox_approx.html).
    """
    staleness = inputs.staleness.to(inputs.logp_behavior.dtype)
    share = staleness / (staleness + 1)
    return inputs.logp_behavior + share * inputs.masked(inputs.logp_current.detach() - inputs.logp_behavior)
