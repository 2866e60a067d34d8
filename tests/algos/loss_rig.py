"""Inputs for losses, in float64, and a way to cut them into parts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from algos.types import LossInputs

RATIOS = torch.logspace(-6, 6, 25, dtype=torch.float64)
ADVANTAGES = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0], dtype=torch.float64)

PROXIMAL_OFFSET = 0.05  # logp_proximal - logp_behavior


def grid() -> LossInputs:
    """Every ratio with every advantage, each sample one advantage, all tokens generated."""
    n, per_sample = len(ADVANTAGES), len(RATIOS)
    behavior = torch.linspace(-4, -1, n * per_sample, dtype=torch.float64)
    return inputs_of(
        (behavior + RATIOS.log().repeat(n)).requires_grad_(),
        behavior,
        ADVANTAGES.repeat_interleave(per_sample),
        torch.arange(n).repeat_interleave(per_sample),
    )


def random_inputs(tokens_per_sample: int = 9, samples: int = 6, seed: int = 0) -> LossInputs:
    """Samples near the policy, with prompts and observations masked."""
    generator = torch.Generator().manual_seed(seed)
    shape = (samples * tokens_per_sample,)
    behavior = -3 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.1
    current = behavior + 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    per_sample = torch.randn(samples, generator=generator, dtype=torch.float64)
    inputs = inputs_of(
        current.requires_grad_(),
        behavior,
        per_sample.repeat_interleave(tokens_per_sample),
        torch.arange(samples).repeat_interleave(tokens_per_sample),
    )
    mask = torch.rand(shape, generator=generator) < 0.7
    staleness = torch.randint(0, 3, shape, generator=generator) * mask
    return replace(inputs, mask=mask, staleness=staleness)


def inputs_of(current: Tensor, behavior: Tensor, advantages: Tensor, sample: Tensor) -> LossInputs:
    n_samples = int(sample.max()) + 1
    return LossInputs(
        logp_current=current,
        logp_behavior=behavior,
        logp_proximal=behavior + PROXIMAL_OFFSET,
        entropy=torch.ones_like(behavior),
        advantages=advantages,
        mask=torch.ones(len(current), dtype=torch.bool),
        sample=sample,
        n_samples=n_samples,
        staleness=torch.zeros(len(current), dtype=torch.int64),
        rewards=torch.stack([advantages[sample == i][0] for i in range(n_samples)]),
    )


def part(inputs: LossInputs, samples: list[int]) -> LossInputs:
    """The given samples only, as a pack of their own; `logp_current` stays on the graph."""
    chosen = torch.isin(inputs.sample, torch.tensor(samples))
    assert inputs.logp_proximal is not None
    return replace(
        inputs,
        logp_current=inputs.logp_current[chosen],
        logp_behavior=inputs.logp_behavior[chosen],
        logp_proximal=inputs.logp_proximal[chosen],
        entropy=inputs.entropy[chosen],
        advantages=inputs.advantages[chosen],
        mask=inputs.mask[chosen],
        sample=torch.searchsorted(torch.tensor(samples), inputs.sample[chosen]),
        n_samples=len(samples),
        staleness=inputs.staleness[chosen],
        rewards=inputs.rewards[samples],
    )


def gradient(per_token: Tensor, inputs: LossInputs) -> Tensor:
    """d(sum of the loss) / d logp_current, (T,)."""
    (found,) = torch.autograd.grad(per_token.sum(), inputs.logp_current)
    return found
