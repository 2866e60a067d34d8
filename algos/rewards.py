"""Reward shaping: what is done to the rewards of a batch before advantages are computed from them.

    @register_shaping("double")
    def double(inputs: RewardInputs, options: NoOptions) -> Tensor:
        return 2 * inputs.rewards

`algo.shaping` lists names (or `package.module:Name`) with their options; each sees the rewards that the one before it
returned. Every rank shapes the whole batch. What is added to a sample's reward counts as earned at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor

from algos.registry import ShapingSpec, get_shaping, parse_options, register_shaping
from algos.types import NotNegative


@dataclass(frozen=True)
class RewardInputs:
    """N samples: the whole batch."""

    rewards: Tensor  # (N,) float64
    group: Tensor  # (N,) int64
    tokens: Tensor  # (N,) int64, generated tokens
    turns: Tensor  # (N,) int64
    truncated: Tensor  # (N,) bool, cut by a limit of length or turns instead of ending by itself
    max_tokens: int  # most that an episode of one context can generate (`Config.episode_tokens`)


@dataclass(frozen=True)
class Shaping:
    """A shaping with its options."""

    spec: ShapingSpec
    options: Any

    def __call__(self, inputs: RewardInputs) -> Tensor:
        """(N,) float64. Raises ValueError for an answer of another shape or with a number that is not finite."""
        shaped: Tensor = self.spec.function(inputs, self.options)
        if shaped.shape != inputs.rewards.shape or not torch.isfinite(shaped).all():
            raise ValueError(
                f"shaping {self.spec.name!r} must answer {tuple(inputs.rewards.shape)} finite rewards, "
                f"answered {tuple(shaped.shape)} with {int((~torch.isfinite(shaped)).sum())} that are not finite"
            )
        return shaped.double()


def make_shaping(shaping: str | ShapingSpec | Callable[..., Tensor], options: Mapping[str, Any]) -> Shaping:
    """One entry of `algo.shaping` as a callable. Raises ValueError."""
    spec = get_shaping(shaping)
    return Shaping(spec, parse_options(spec, options))


def check_shaping(shaping: Shaping, max_tokens: int) -> None:
    """Try it on two samples, so that what is wrong with it is known before anything starts. Raises ValueError."""
    inputs = RewardInputs(
        rewards=torch.tensor([0.0, 1.0], dtype=torch.float64),
        group=torch.tensor([0, 0]),
        tokens=torch.tensor([1, max_tokens]),
        turns=torch.tensor([1, 1]),
        truncated=torch.tensor([False, True]),
        max_tokens=max_tokens,
    )
    try:
        shaping(inputs)
    except Exception as error:
        raise ValueError(f"shaping {shaping.spec.name!r} fails on two samples: {error}") from error


def shape(inputs: RewardInputs, shapings: Iterable[Shaping]) -> Tensor:
    """(N,) float64 rewards after all of them, in order."""
    for shaping in shapings:
        inputs = replace(inputs, rewards=shaping(inputs))
    return inputs.rewards


Tokens = Annotated[int, Meta(ge=1)]


@dataclass(frozen=True)
class OverlongOptions:
    max_tokens: Tokens | None = None
    """Generated tokens of an episode from which the penalty is whole; None: the most it can generate in one context.
    An agent that begins contexts anew needs a number of its own."""
    buffer: Tokens | None = None
    """The penalty grows from 0 to `penalty` over this many tokens; None: a fifth of max_tokens, as in the paper."""
    penalty: NotNegative = 1.0
    """What is taken off the reward of an episode of max_tokens."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.buffer is not None and self.buffer > self.max_tokens:
            raise ValueError(f"buffer={self.buffer} must be at most max_tokens={self.max_tokens}")


@register_shaping("overlong", OverlongOptions)
def overlong(inputs: RewardInputs, options: OverlongOptions) -> Tensor:
    """Soft over-long punishment: DAPO, eq. 13 (https://arxiv.org/abs/2503.14476).

    r - penalty * clip((tokens - (max_tokens - buffer)) / buffer, 0, 1).
    """
    longest = options.max_tokens or inputs.max_tokens
    buffer = options.buffer or max(1, longest // 5)
    if buffer > longest:
        raise ValueError(f"buffer={buffer} is more than the {longest} tokens of an episode")
    beyond = (inputs.tokens - (longest - buffer)).double() / buffer
    return inputs.rewards - options.penalty * beyond.clamp(0, 1)


@dataclass(frozen=True)
class AffineOptions:
    scale: float = 1.0
    shift: float = 0.0
    low: float | None = None
    """Rewards below it count as this much, after scale and shift."""
    high: float | None = None
    """The same limit above."""

    def __post_init__(self) -> None:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}")


@register_shaping("affine", AffineOptions)
def affine(inputs: RewardInputs, options: AffineOptions) -> Tensor:
    """clip(scale * r + shift, low, high): such as -1 and 1 instead of 0 and 1."""
    shaped = options.scale * inputs.rewards + options.shift
    bounded = options.low is not None or options.high is not None
    return shaped.clamp(options.low, options.high) if bounded else shaped


@register_shaping("truncation", AffineOptions)
def truncation(inputs: RewardInputs, options: AffineOptions) -> Tensor:
    """`affine` for truncated samples only; scale 0 takes their reward away."""
    return torch.where(inputs.truncated, affine(inputs, options), inputs.rewards)
