"""Losses against the papers' formulas, written here a second time in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from algos.registry import make_loss
from algos.types import LossInputs
from tests.algos.loss_rig import PROXIMAL_OFFSET, gradient, grid

Reference = Callable[[float, float, float], tuple[float, float]]  # (current, behavior, A) -> (loss, d loss / d current)


def ppo_reference(low: float, high: float, dual: float | None) -> Reference:
    def loss(current: float, behavior: float, advantage: float) -> tuple[float, float]:
        ratio = math.exp(current - behavior)
        plain = ratio * advantage
        objective = min(plain, min(max(ratio, 1 - low), 1 + high) * advantage)
        slope = ratio * advantage if objective == plain else 0.0
        if dual is not None and advantage < 0 and objective < dual * advantage:
            objective, slope = dual * advantage, 0.0
        return -objective, -slope

    return loss


def reinforce_reference(current: float, behavior: float, advantage: float) -> tuple[float, float]:
    return -advantage * current, -advantage


def decoupled_reference(cap: float) -> Reference:
    inner = ppo_reference(0.2, 0.2, None)

    def loss(current: float, behavior: float, advantage: float) -> tuple[float, float]:
        proximal = behavior + PROXIMAL_OFFSET
        value, slope = inner(current, proximal, advantage)
        weight = min(math.exp(proximal - behavior), cap)
        return weight * value, weight * slope

    return loss


def tis_reference(cap: float) -> Reference:
    def loss(current: float, behavior: float, advantage: float) -> tuple[float, float]:
        weight = min(math.exp(current - behavior), cap)
        return -weight * advantage * current, -weight * advantage

    return loss


CASES: list[tuple[str, dict[str, Any], Reference]] = [
    ("ppo", {}, ppo_reference(0.2, 0.2, None)),
    ("grpo", {}, ppo_reference(0.2, 0.2, None)),
    ("ppo", {"clip_low": 0.3, "clip_high": 0.28}, ppo_reference(0.3, 0.28, None)),
    ("ppo", {"clip_high": 0.28, "dual_clip": 3}, ppo_reference(0.2, 0.28, 3.0)),
    ("reinforce", {}, reinforce_reference),
    ("decoupled_ppo", {}, decoupled_reference(5.0)),
    ("decoupled_ppo", {"cap": 1.02}, decoupled_reference(1.02)),
    ("tis", {}, tis_reference(2.0)),
    ("tis", {"cap": 1.0}, tis_reference(1.0)),
]


@pytest.mark.parametrize("name, options, reference", CASES, ids=[f"{name}{options}" for name, options, _ in CASES])
def test_value_and_gradient(name: str, options: dict[str, Any], reference: Reference) -> None:
    """Ratios from 1e-6 to 1e6, advantages of both signs and zero; to 12 digits."""
    inputs = grid()
    result = make_loss(name, options)(inputs)
    expected = [
        reference(float(current), float(behavior), float(advantage))
        for current, behavior, advantage in zip(
            inputs.logp_current.detach(), inputs.logp_behavior, inputs.advantages, strict=True
        )
    ]
    values, slopes = torch.tensor(expected, dtype=torch.float64).T
    torch.testing.assert_close(result.per_token, values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient(result.per_token, inputs), slopes, rtol=1e-12, atol=1e-12)


def on_policy_gradient(name: str, inputs: LossInputs) -> torch.Tensor:
    inputs.logp_behavior = inputs.logp_current.detach().clone()
    return gradient(make_loss(name, {})(inputs).per_token, inputs)


@pytest.mark.parametrize("name", ["ppo", "tis"])
def test_on_policy_all_are_the_policy_gradient(name: str) -> None:
    torch.testing.assert_close(on_policy_gradient(name, grid()), on_policy_gradient("reinforce", grid()))


def test_clip_fraction_counts_tokens_whose_gradient_the_clip_stops() -> None:
    inputs = grid()
    ratio = (inputs.logp_current - inputs.logp_behavior).exp()
    outside = ((ratio > 1.2) & (inputs.advantages > 0)) | ((ratio < 0.8) & (inputs.advantages < 0))
    torch.testing.assert_close(make_loss("ppo", {})(inputs).metrics["clip_fraction"], outside.float())
    dual = make_loss("ppo", {"dual_clip": 3})(inputs)
    stopped = (gradient(dual.per_token, inputs) == 0) & (inputs.advantages != 0)
    torch.testing.assert_close(dual.metrics["clip_fraction"], stopped.float())


@pytest.mark.parametrize(
    "name, options",
    [
        ("ppo", {"clip_low": 1.5}),
        ("ppo", {"clip_high": -0.1}),
        ("ppo", {"dual_clip": 0.5}),
        ("decoupled_ppo", {"cap": -1.0}),
        ("tis", {"cap": 0.0}),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make_loss(name, options)
