"""What every registered loss must hold: a new file in `algos` is picked up by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from algos.registry import loss_names, make_loss
from tests.algos.loss_rig import gradient, grid, part, random_inputs

every_loss = pytest.mark.parametrize("name", loss_names())
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@every_loss
@every_dtype
def test_finite_for_ratios_from_1e_minus_6_to_1e6(name: str, dtype: torch.dtype) -> None:
    inputs = grid()
    assert inputs.logp_proximal is not None
    inputs = replace(
        inputs,
        logp_current=inputs.logp_current.detach().to(dtype).requires_grad_(),
        logp_behavior=inputs.logp_behavior.to(dtype),
        logp_proximal=inputs.logp_proximal.to(dtype),
        advantages=inputs.advantages.to(dtype),
        entropy=inputs.entropy.to(dtype),
    )
    result = make_loss(name, {})(inputs)
    assert result.per_token.shape == inputs.logp_current.shape
    assert torch.isfinite(result.per_token).all()
    assert torch.isfinite(gradient(result.per_token, inputs)).all()


@every_loss
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_masked_tokens_change_nothing(name: str, poison: float) -> None:
    inputs = random_inputs()
    clean = make_loss(name, {})(inputs)
    clean_gradient = gradient(clean.per_token, inputs)
    assert inputs.logp_proximal is not None
    dirty = replace(
        inputs,
        logp_current=inputs.logp_current.detach().masked_fill(~inputs.mask, poison).requires_grad_(),
        logp_behavior=inputs.logp_behavior.masked_fill(~inputs.mask, poison),
        logp_proximal=inputs.logp_proximal.masked_fill(~inputs.mask, poison),
        entropy=inputs.entropy.masked_fill(~inputs.mask, poison),
    )
    result = make_loss(name, {})(dirty)
    assert torch.equal(result.per_token, clean.per_token)
    assert not result.per_token[~inputs.mask].any()
    found = gradient(result.per_token, dirty)
    assert torch.equal(found, clean_gradient)
    assert not found[~inputs.mask].any()


@every_loss
def test_how_samples_are_cut_into_packs_changes_nothing(name: str) -> None:
    inputs = random_inputs()
    loss = make_loss(name, {})
    whole = loss(inputs)
    cuts = [[0, 3], [1], [2, 4, 5]]
    parts = [loss(part(inputs, samples)) for samples in cuts]
    for samples, result in zip(cuts, parts, strict=True):
        torch.testing.assert_close(
            result.per_token, whole.per_token[torch.isin(inputs.sample, torch.tensor(samples))], rtol=1e-12, atol=1e-12
        )
        assert result.metrics.keys() == whole.metrics.keys()
    total = sum((result.per_token.sum() for result in parts), torch.zeros((), dtype=torch.float64))
    (found,) = torch.autograd.grad(total, inputs.logp_current)
    torch.testing.assert_close(found, gradient(loss(inputs).per_token, inputs), rtol=1e-12, atol=1e-12)


@every_loss
def test_descent_raises_good_tokens_and_lowers_bad_ones_on_policy(name: str) -> None:
    inputs = random_inputs()
    on_policy = inputs.logp_current.detach()
    slope = gradient(
        make_loss(name, {})(replace(inputs, logp_behavior=on_policy, logp_proximal=on_policy)).per_token, inputs
    )
    assert (slope[inputs.mask] * inputs.advantages[inputs.mask] < 0).all()


@every_loss
def test_a_pack_without_generated_tokens(name: str) -> None:
    inputs = replace(random_inputs(), mask=torch.zeros(54, dtype=torch.bool))
    per_token = make_loss(name, {})(inputs).per_token
    assert not per_token.any() and not gradient(per_token, inputs).any()
