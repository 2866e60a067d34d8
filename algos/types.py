"""The data a loss sees and the result it returns.

Three policies by name: `logp_behavior` sampled the tokens, `logp_proximal` is the anchor of the trust
region (None unless the loss declares `needs_proximal`), `logp_current` is being trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
"""Numbers of options, with what holds of them: `algos.registry.parse_options` refuses others."""

LOG_RATIO_BOUND = 30.0  # e^30 = 1e13, far beyond any clip range; its square still fits a float32


@dataclass
class LossInputs:
    """One pack: T tokens of several samples, padding-free. All per-token tensors are float32 unless said."""

    logp_current: Tensor  # (T,) carries the gradient
    logp_behavior: Tensor  # (T,) of the distribution sampled from
    logp_proximal: Tensor | None  # (T,)
    entropy: Tensor  # (T,) of the current policy; carries no gradient unless asked for
    advantages: Tensor  # (T,) of each token; see algos/advantages.py
    mask: Tensor  # (T,) bool, true on generated tokens
    sample: Tensor  # (T,) int64, index of the sample in this pack: 0 .. n_samples - 1
    n_samples: int
    staleness: Tensor  # (T,) int64, current version minus the token's policy version; 0 where masked
    rewards: Tensor  # (n_samples,)
    logp_reference: Tensor | None = None  # (T,) of a frozen policy, where `algo.kl` asks for one
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """(T, ...) of each column that a plug-in has registered (`rl/wire/columns.py`), 0 outside the mask."""

    def masked(self, values: Tensor) -> Tensor:
        """Values with exactly zero (value and gradient, even for inf or nan) outside the mask."""
        return torch.where(self.mask, values, torch.zeros_like(values))

    def log_ratio(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        """(T,) log(pi_numerator / pi_denominator), 0 outside the mask, bounded so that its exponential stays finite."""
        return self.masked(numerator - denominator).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)

    def sample_sum(self, values: Tensor) -> Tensor:
        """(n_samples,) sums of (T,) values over each sample's generated tokens."""
        return values.new_zeros(self.n_samples).index_add(0, self.sample, self.masked(values))

    def sample_mean(self, values: Tensor) -> Tensor:
        """(n_samples,) means of (T,) values over each sample's generated tokens; 0 for a sample without any."""
        return self.sample_sum(values) / self.sample_sum(torch.ones_like(values)).clamp(min=1)


@dataclass
class LossResult:
    """`per_token` is (T,); the learner sums it over the mask and divides by the global token count."""

    per_token: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)  # (T,) tensors, averaged over the mask by the learner
