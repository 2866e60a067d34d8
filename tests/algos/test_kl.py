"""KL estimators against the exact divergence of two distributions, and the gradients of the penalty."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from algos.conformance import gradient, random_inputs
from algos.kl import KLEstimator, kl_estimate, kl_loss
from algos.regularisation import Regularisation
from algos.types import LossResult

KINDS: list[KLEstimator] = ["k1", "k2", "k3"]


def two_policies() -> tuple[Tensor, Tensor]:
    """(V,) logits with a gradient, and log-probabilities of the reference."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    return logits, reference


@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: KLEstimator) -> None:
    logp = torch.tensor([-1.0, -2.0, -0.5])
    reference = torch.tensor([-1.5, -0.25, -0.5])
    x = torch.tensor([0.5, -1.75, 0.0])
    expected = {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) - 1 + x}[kind]
    torch.testing.assert_close(kl_estimate(kind, logp, reference), expected)
    torch.testing.assert_close(kl_loss(kind, logp, reference), expected)


def test_a_small_kl_is_no_rounding() -> None:
    """As after a first step at a learning rate of 1e-6."""
    random = torch.Generator().manual_seed(0)
    logp = -2 * torch.rand(1_000_000, generator=random)
    reference = logp - 1e-4 * torch.randn(1_000_000, generator=random)
    found = kl_estimate("k3", logp, reference)
    expected = kl_estimate("k3", logp.double(), reference.double())
    assert found.min() >= 0
    assert float(found.double().mean()) == pytest.approx(float(expected.mean()), rel=1e-4)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_mean_over_the_policy_is_the_divergence(kind: KLEstimator) -> None:
    logits, reference = two_policies()
    logp = logits.log_softmax(-1).detach()
    exact = (logp.exp() * (logp - reference)).sum()
    torch.testing.assert_close((logp.exp() * kl_estimate(kind, logp, reference)).sum(), exact)


@pytest.mark.parametrize("kind", ["k1", "k2"])
def test_mean_gradient_is_that_of_the_divergence(kind: KLEstimator) -> None:
    """Weights are the sampling policy's and carry no gradient: what a loss over samples sees on-policy."""
    logits, reference = two_policies()
    logp = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((logp.exp().detach() * kl_loss(kind, logp, reference)).sum(), logits)
    torch.testing.assert_close(found, exact)


def test_the_plain_gradient_of_k1_would_regularise_nothing() -> None:
    logits, reference = two_policies()
    logp = logits.log_softmax(-1)
    (plain,) = torch.autograd.grad((logp.exp().detach() * kl_estimate("k1", logp, reference)).sum(), logits)
    assert plain.abs().max() < 1e-12


def test_gradient_of_k3() -> None:
    logp = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    (found,) = torch.autograd.grad(kl_loss("k3", logp, reference).sum(), logp)
    torch.testing.assert_close(found, 1 - (reference - logp.detach()).exp())


@pytest.mark.parametrize("kind", KINDS)
def test_finite_for_absurd_ratios(kind: KLEstimator) -> None:
    logp = torch.tensor([-1000.0, 0.0], requires_grad=True)
    penalty = kl_loss(kind, logp, torch.tensor([0.0, -1000.0]))
    (found,) = torch.autograd.grad(penalty.sum(), logp)
    assert torch.isfinite(penalty).all() and torch.isfinite(found).all()


def test_regularisation_adds_penalty_and_bonus_to_generated_tokens_only() -> None:
    inputs = random_inputs()
    reference = inputs.logp_behavior - 0.3
    inputs = replace(inputs, logp_reference=reference.masked_fill(~inputs.mask, torch.nan))
    plain = LossResult(inputs.masked(-inputs.advantages * inputs.masked(inputs.logp_current)), {"clip": inputs.entropy})
    result = Regularisation(kl_coef=0.5, kl_estimator="k2", entropy_coef=0.1)(inputs, plain)
    x = (inputs.logp_current - reference).detach()
    expected = plain.per_token.detach() + torch.where(inputs.mask, 0.5 * x**2 / 2 - 0.1 * inputs.entropy, 0)
    torch.testing.assert_close(result.per_token.detach(), expected)
    torch.testing.assert_close(
        gradient(result.per_token, inputs), torch.where(inputs.mask, -inputs.advantages + 0.5 * x, 0)
    )
    assert result.metrics.keys() == {"clip", "kl_reference"}


def test_without_coefficients_the_loss_is_untouched_and_the_divergence_known() -> None:
    inputs = random_inputs()
    plain = LossResult(inputs.masked(inputs.logp_current))
    assert Regularisation()(inputs, plain).per_token is plain.per_token
    known = Regularisation(kl_estimator="k1")(replace(inputs, logp_reference=inputs.logp_behavior), plain)
    assert known.per_token is plain.per_token
    difference = (inputs.logp_current - inputs.logp_behavior).detach()
    torch.testing.assert_close(known.metrics["kl_reference"], inputs.masked(difference))
