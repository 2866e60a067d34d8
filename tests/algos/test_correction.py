"""Corrections by hand, and one identity."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from algos.conformance import gradient, inputs_of, random_inputs
from algos.correction import Correction
from algos.registry import make_loss, registered
from algos.types import LossInputs

REINFORCE = make_loss("reinforce", {})


def two_samples() -> LossInputs:
    """Ratios pi_proximal / pi_behavior of (0.5, 3) and (1.1, 1.2); the current policy is the proximal one."""
    ratios = torch.tensor([0.5, 3.0, 1.1, 1.2], dtype=torch.float64)
    behavior = torch.tensor([-1.0, -2.0, -1.5, -0.5], dtype=torch.float64)
    proximal = behavior + ratios.log()
    inputs = inputs_of(proximal.clone().requires_grad_(), behavior, torch.ones(4).double(), torch.tensor([0, 0, 1, 1]))
    return replace(inputs, logp_proximal=proximal)


@pytest.mark.parametrize(
    "correction, weights",
    [
        (Correction(mask="none", weight="token", cap=2.0), [0.5, 2.0, 1.1, 1.2]),
        (Correction(mask="none", weight="sequence", cap=1.4), [1.4, 1.4, 1.32, 1.32]),
        (Correction(weight="none", mask="token", low=0.6, high=2.0), [0.0, 0.0, 1.0, 1.0]),
        (Correction(weight="none", mask="token", low=0.4, high=2.0), [1.0, 0.0, 1.0, 1.0]),
        (Correction(weight="token", cap=9.0, mask="token", low=0.4, high=2.0), [0.5, 0.0, 1.1, 1.2]),  # IcePop
        (Correction(weight="none", mask="sequence", low=0.5, high=1.4), [0.0, 0.0, 1.0, 1.0]),
        (Correction(weight="none", mask="geometric", low=0.9, high=1.2), [0.0, 0.0, 1.0, 1.0]),  # 1.22 and 1.15
        (Correction(weight="sequence", cap=9.0, mask="geometric", low=0.9, high=1.3), [1.5, 1.5, 1.32, 1.32]),
    ],
)
def test_weights(correction: Correction, weights: list[float]) -> None:
    inputs = two_samples()
    slopes = gradient(correction(inputs, REINFORCE).per_token, inputs)
    torch.testing.assert_close(slopes, -torch.tensor(weights, dtype=torch.float64))


def test_what_each_cut_took_is_logged() -> None:
    metrics = Correction(weight="token", cap=2.0, mask="geometric", low=0.9, high=1.2)(two_samples(), REINFORCE).metrics
    assert metrics["correction_truncated_fraction"].tolist() == [0, 1, 0, 0]
    assert metrics["correction_masked_fraction"].tolist() == [1, 1, 0, 0]
    torch.testing.assert_close(metrics["correction_weight"], torch.tensor([0.5, 2.0, 1.1, 1.2]).double())


def test_without_one_the_loss_is_untouched() -> None:
    inputs = random_inputs()
    assert not Correction(weight="none", mask="none").active
    assert torch.equal(Correction(weight="none", mask="none")(inputs, REINFORCE).per_token, REINFORCE(inputs).per_token)


@pytest.mark.parametrize("name", registered("loss"))
def test_a_mask_alone_leaves_the_losss_own_weights(name: str) -> None:
    inputs = random_inputs()
    loss = make_loss(name, {})
    masked = Correction(weight="none", mask="token", low=0.0, high=1e30)(inputs, loss)
    torch.testing.assert_close(masked.per_token, loss(inputs).per_token)


@pytest.mark.parametrize("name", registered("loss"))
def test_under_a_weight_the_proximal_policy_counts_as_the_one_that_sampled(name: str) -> None:
    inputs = random_inputs()
    loss = make_loss(name, {})
    assert inputs.logp_proximal is not None
    weight = (inputs.logp_proximal - inputs.logp_behavior).detach().exp()
    expected = weight * loss(replace(inputs, logp_behavior=inputs.logp_proximal)).per_token
    torch.testing.assert_close(Correction(mask="none", weight="token", cap=1e30)(inputs, loss).per_token, expected)


def test_corrected_ppo_is_decoupled_ppo() -> None:
    inputs = random_inputs()
    corrected = Correction(mask="none", weight="token", cap=5.0)(inputs, make_loss("ppo", {})).per_token
    decoupled = make_loss("decoupled_ppo", {"cap": 5.0})(inputs).per_token
    torch.testing.assert_close(corrected, decoupled)
