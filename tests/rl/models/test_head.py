"""The chunked head against log_softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl.models import head
from rl.models.head import token_logprobs

T = 23
H = 8
V = 97
TEMPERATURE = 0.7


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(V, (T,), generator=generator)


def reference(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.T / TEMPERATURE).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.fixture(params=[0, 1 << 26], ids=["recomputed", "kept"])
def kept_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many bytes of probabilities may be kept for backward."""
    monkeypatch.setattr(head, "KEPT_BYTES", request.param)
    return int(request.param)


@pytest.mark.usefixtures("kept_bytes")
@pytest.mark.parametrize("chunk", [1, 7, T, 100])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients(chunk: int, entropy_gradient: bool) -> None:
    hidden, weight, targets = inputs()
    plain_hidden, plain_weight, _ = inputs()
    coefficients = torch.linspace(-2, 3, T, dtype=torch.float64)
    logp, entropy = token_logprobs(
        hidden, weight, targets, temperature=TEMPERATURE, chunk=chunk, entropy_gradient=entropy_gradient
    )
    plain_logp, plain_entropy = reference(plain_hidden, plain_weight, targets)
    torch.testing.assert_close(logp, plain_logp, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, plain_entropy, rtol=0, atol=1e-12)

    assert entropy.requires_grad == entropy_gradient
    bonus = 0.3 if entropy_gradient else 0.0
    (coefficients * logp + bonus * coefficients.cos() * entropy).sum().backward()
    (coefficients * plain_logp + bonus * coefficients.cos() * plain_entropy).sum().backward()
    torch.testing.assert_close(hidden.grad, plain_hidden.grad, rtol=0, atol=1e-11)
    torch.testing.assert_close(weight.grad, plain_weight.grad, rtol=0, atol=1e-11)


@pytest.mark.usefixtures("kept_bytes")
@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_arithmetic_is_float32_for_any_input(dtype: torch.dtype, atol: float) -> None:
    """bfloat16 inputs are exact numbers: the result differs from float64 by float32 rounding only."""
    hidden, weight, targets = inputs(dtype)
    logp, entropy = token_logprobs(hidden, weight, targets, temperature=TEMPERATURE, chunk=5)
    assert logp.dtype == entropy.dtype == torch.float32
    wide_hidden, wide_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    plain_logp, plain_entropy = reference(wide_hidden, wide_weight, targets)
    torch.testing.assert_close(logp.double(), plain_logp, rtol=0, atol=atol)
    torch.testing.assert_close(entropy.double(), plain_entropy, rtol=0, atol=atol)
    logp.sum().backward()
    plain_logp.sum().backward()
    one_rounding = 2 ** (-8 if dtype == torch.bfloat16 else -20)  # the gradient is rounded once, at the end
    assert hidden.grad is not None and weight.grad is not None
    torch.testing.assert_close(hidden.grad.double(), wide_hidden.grad, rtol=one_rounding, atol=1e-5)
    torch.testing.assert_close(weight.grad.double(), wide_weight.grad, rtol=one_rounding, atol=1e-5)


@pytest.mark.parametrize("allowed", [0, 1])
def test_of_vocabulary_size_per_token_only_what_is_small_is_saved(
    allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "KEPT_BYTES", allowed * T * V * 8)
    hidden, weight, targets = inputs()
    saved: list[int] = []

    def record(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        token_logprobs(hidden, weight, targets, chunk=5)
    # hidden, weight, targets, logsumexp, and the probabilities where they may be kept
    assert sorted(saved) == sorted([T * H, V * H, T, T] + allowed * [T * V])


def test_no_tokens_give_zero_gradients() -> None:
    hidden, weight, targets = inputs()
    logp, _ = token_logprobs(hidden[:0], weight, targets[:0])
    assert logp.shape == (0,)
    logp.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.usefixtures("kept_bytes")
def test_extreme_logits_stay_finite() -> None:
    hidden, weight, targets = inputs(torch.float32)
    logp, entropy = token_logprobs(hidden * 1e3, weight, targets, chunk=5, entropy_gradient=True)
    (logp + entropy).sum().backward()
    for values in (logp, entropy, hidden.grad, weight.grad):
        assert values is not None and torch.isfinite(values).all()
