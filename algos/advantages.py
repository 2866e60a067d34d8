"""Advantages of a whole batch: N samples in groups, M turns, and the T tokens that this rank holds.

An estimator works on one of three levels (`register_advantage(name, options, level=...)`):

    sample  (rewards (N,), group (N,) int64) -> (N,)    one number per sample, on each of its tokens
    turn    (Episodes, options) -> (M,)                 one number per turn
    token   (Episodes, options) -> (T,)                 one number per generated token

Rewards are the environment's, shaped (`algos.rewards`), less a KL penalty if it is charged to the reward.
Everything is computed in float64 from sums over the whole batch, so packs and ranks change nothing. Whatever compares
members is exactly 0 where all are equal, however their mean is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from algos.registry import AdvantageSpec, NoOptions, get_advantage, parse_options, register_advantage
from algos.types import Share

STD_FLOOR = 1e-6

AllReduce = Callable[[Tensor, Literal["sum", "max"]], Tensor]


def one_rank(values: Tensor, how: Literal["sum", "max"]) -> Tensor:
    """The reduction over ranks where there is one."""
    return values


@dataclass(frozen=True)
class Episodes:
    """Samples and turns are those of the whole batch, identical on every rank; tokens are this rank's own.

    A turn's tokens stand together, in order, and so do a sample's turns, in the order of time: where its history forked
    (branches, sub-agents), whatever the sequence that holds them. Rewards are float64.
    """

    group: Tensor  # (N,) int64
    turn_rewards: Tensor  # (M,)
    turn_sample: Tensor  # (M,) int64, ascending
    turn_state: Tensor  # (M,) int64, equal within a group for turns that answer the same observation
    token_rewards: Tensor  # (T,) a turn's reward stands on its last generated token
    token_turn: Tensor  # (T,) int64, index into the turns
    mask: Tensor  # (T,) bool, true on generated tokens
    values: Tensor | None = None  # (T,) the critic's value of the context before each generated token
    all_reduce: AllReduce = one_rank

    @property
    def rewards(self) -> Tensor:
        """(N,) of whole episodes."""
        return self.turn_rewards.new_zeros(len(self.group)).index_add(0, self.turn_sample, self.turn_rewards)

    @property
    def token_sample(self) -> Tensor:
        """(T,) int64, index into the samples."""
        return self.turn_sample[self.token_turn]


@dataclass(frozen=True)
class Estimator:
    """An advantage with its options: what the learner calls."""

    spec: AdvantageSpec
    options: Any

    def __call__(self, episodes: Episodes) -> Tensor:
        """(T,) float32, 0 on tokens that were not generated.

        Raises ValueError when it needs values and has none, and for numbers that are too few or not finite.
        """
        spec = self.spec
        if spec.needs_values and episodes.values is None:
            raise ValueError(f"advantage {spec.name!r} needs the values of a critic")

        if spec.level == "sample":
            found = spec.function(episodes.rewards, episodes.group)
        else:
            found = spec.function(episodes, self.options)
        expected = {"sample": episodes.group, "turn": episodes.turn_sample, "token": episodes.mask}[spec.level].shape
        if found.shape != expected or not torch.isfinite(found).all():
            raise ValueError(
                f"advantage {spec.name!r} must give {expected[0]} finite numbers, one per {spec.level}; gave "
                f"{tuple(found.shape)}, {int((~torch.isfinite(found)).sum())} of them not finite"
            )

        if spec.level != "token":
            found = found[episodes.token_sample if spec.level == "sample" else episodes.token_turn]
        return torch.where(episodes.mask, found, torch.zeros_like(found)).float()


def make_estimator(estimator: str | AdvantageSpec | Callable[..., Tensor], options: Mapping[str, Any]) -> Estimator:
    """An estimator and the options that stand with it in `algo.advantage` as one callable. Raises ValueError."""
    spec = get_advantage(estimator)
    return Estimator(spec, parse_options(spec, options))


# ---------------------------------------------------------------- one number per sample


@register_advantage("group", needs_group=True)
def group_normalised(rewards: Tensor, group: Tensor) -> Tensor:
    """(r - mean) / std within the group, population std: GRPO, eq. 3 (https://arxiv.org/abs/2402.03300)."""
    centred, index, count = _centre(rewards, group)
    variance = torch.zeros_like(count).index_add_(0, index, centred**2) / count
    return (centred / (variance.sqrt()[index] + STD_FLOOR)).float()


@register_advantage("group_mean", needs_group=True)
def group_centred(rewards: Tensor, group: Tensor) -> Tensor:
    """r - mean of the group: Dr. GRPO, no bias towards groups of little spread (https://arxiv.org/abs/2503.20783)."""
    return _centre(rewards, group)[0].float()


@register_advantage("leave_one_out", needs_group=True)
def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """r - mean of the *other* members, an unbiased baseline: RLOO (https://arxiv.org/abs/2402.14740).

    Equal to G / (G - 1) times the centred reward; 0 for a group of one.
    """
    centred, index, count = _centre(rewards, group)
    return (centred * (count / (count - 1).clamp(min=1))[index]).float()


def _centre(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(r - group mean (N,), index of the group (N,), members of each group (groups,)), float64."""
    rewards = rewards.double()
    unique, index = group.unique(return_inverse=True)
    blank = rewards.new_zeros(len(unique))
    count = blank.index_add(0, index, torch.ones_like(rewards))
    mean = blank.index_add(0, index, rewards) / count
    low = blank.scatter_reduce(0, index, rewards, "amin", include_self=False)
    high = blank.scatter_reduce(0, index, rewards, "amax", include_self=False)
    centred = torch.where((low == high)[index], torch.zeros_like(rewards), rewards - mean[index])
    return centred, index, count


# ---------------------------------------------------------------- one number per turn


@dataclass(frozen=True)
class TurnOptions:
    discount: Share = 1.0
    """The factor for the rewards of later turns."""


@register_advantage("turn", TurnOptions, level="turn", needs_group=True)
def turn_returns(episodes: Episodes, options: TurnOptions) -> Tensor:
    """(G_k - mean) / std over all turns of the group, G_k = sum of discount^(j-k) r_j over the turns j >= k.

    Reward-to-go per turn (https://arxiv.org/abs/2505.11821 on why turns need credit of their own): a turn is not
    praised for what came before it. With one turn per episode it is `group`.
    """
    returns = discounted_sums(episodes.turn_rewards, episodes.turn_sample, options.discount)
    return group_normalised(returns, episodes.group[episodes.turn_sample])


@register_advantage("turn_process", TurnOptions, level="turn", needs_group=True)
def turn_process(episodes: Episodes, options: TurnOptions) -> Tensor:
    """Sum of discount^(j-k) (r_j - mean) / std over the turns j >= k; mean and std over all turns of the group.

    GRPO with process supervision, section 4.1.3 of https://arxiv.org/abs/2402.03300 (there undiscounted): for
    environments that reward every turn.
    """
    normalised = group_normalised(episodes.turn_rewards, episodes.group[episodes.turn_sample]).double()
    return discounted_sums(normalised, episodes.turn_sample, options.discount)


@dataclass(frozen=True)
class TurnLocalOptions:
    weight: float = 1.0
    """The weight of the turn's own reward, beside the episode's."""


@register_advantage("turn_local", TurnLocalOptions, level="turn", needs_group=True)
def turn_local(episodes: Episodes, options: TurnLocalOptions) -> Tensor:
    """(R - mean) / std over the group's episodes + weight * (r_k - mean) / std over all its turns.

    This adds an episode's and a step's advantage, as in GiGPO (https://arxiv.org/abs/2505.10978, eq. 8), but takes the
    step's from its own reward alone. So a penalty falls on the turn that earned it and on no earlier one, and what an
    episode is worth falls on all its turns alike.
    """
    whole = group_normalised(episodes.rewards, episodes.group)[episodes.turn_sample]
    return whole + options.weight * group_normalised(episodes.turn_rewards, episodes.group[episodes.turn_sample])


@dataclass(frozen=True)
class GigpoOptions:
    weight: float = 1.0
    """The weight of the step's advantage, beside the episode's (omega)."""
    discount: Share = 0.95
    """The factor for the rewards of later turns, in the step's return (gamma)."""
    std: bool = True
    """Divide by the standard deviation; without, the means alone are taken off (F_norm = 1)."""


@register_advantage("gigpo", GigpoOptions, level="turn", needs_group=True)
def gigpo(episodes: Episodes, options: GigpoOptions) -> Tensor:
    """A_episode + weight * A_step: GiGPO, eq. 3 to 8 of https://arxiv.org/abs/2505.10978.

    A_episode compares whole rewards within the group. A_step compares the discounted reward-to-go of all turns of the
    group that answer the same observation (the anchor state), whichever episode and turn they stand in. A turn whose
    observation nobody else met has no step's advantage.
    """
    compare = group_normalised if options.std else group_centred
    group = episodes.group[episodes.turn_sample]
    anchor = torch.stack([group, episodes.turn_state]).unique(dim=1, return_inverse=True)[1]
    returns = discounted_sums(episodes.turn_rewards, episodes.turn_sample, options.discount)
    whole = compare(episodes.rewards, episodes.group)[episodes.turn_sample]
    return whole + options.weight * compare(returns, anchor)


# ---------------------------------------------------------------- one number per token


@register_advantage("batch", level="token")
def batch_normalised(episodes: Episodes, options: NoOptions) -> Tensor:
    """Reward-to-go of each token, normalised over the tokens of the batch: REINFORCE++ (https://arxiv.org/abs/2501.03262).

    No group is needed. Without per-turn rewards or a KL penalty every token of a sample has the same one.
    """
    mask = episodes.mask
    returns = discounted_sums(episodes.token_rewards[mask], episodes.token_sample[mask], 1.0)
    return _normalised_over_batch(returns, episodes)


@register_advantage("batch_group", level="token", needs_group=True)
def batch_normalised_group_centred(episodes: Episodes, options: NoOptions) -> Tensor:
    """r - mean of the group, normalised over the tokens of the batch: REINFORCE++-baseline (same paper)."""
    centred = _centre(episodes.rewards, episodes.group)[0]
    return _normalised_over_batch(centred[episodes.token_sample][episodes.mask], episodes)


@dataclass(frozen=True)
class GAEOptions:
    discount: Share = 1.0
    """gamma, per generated token."""
    lam: Share = 1.0
    """The lambda of the policy's advantages: 1 is return minus value, smaller trusts the critic more."""
    normalise: bool = True
    """Subtract the mean and divide by the standard deviation over the tokens of the batch."""


@register_advantage("gae", GAEOptions, level="token", needs_values=True)
def gae(episodes: Episodes, options: GAEOptions) -> Tensor:
    """Generalised advantage estimation over generated tokens (https://arxiv.org/abs/1506.02438, eq. 16).

    A_t = sum of (gamma lambda)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t; t + 1 is the next *generated* token,
    whatever the environment said in between, and nothing follows the last one.
    """
    advantages = gae_advantages(episodes, options.discount, options.lam)
    return _normalised_over_batch(advantages[episodes.mask], episodes) if options.normalise else advantages


def gae_advantages(episodes: Episodes, discount: float, lam: float) -> Tensor:
    """(T,) float64, not normalised, 0 on tokens that were not generated. Plus the values: what a critic learns."""
    assert episodes.values is not None
    mask = episodes.mask
    values = episodes.values[mask].double()
    sample = episodes.token_sample[mask]
    goes_on = torch.zeros_like(values)
    goes_on[:-1] = sample[1:] == sample[:-1]
    deltas = episodes.token_rewards[mask] + discount * goes_on * values.roll(-1) - values
    advantages = torch.zeros_like(episodes.token_rewards)
    advantages[mask] = discounted_sums(deltas, sample, discount * lam)
    return advantages


def discounted_sums(values: Tensor, owner: Tensor, discount: float) -> Tensor:
    """(n,) float64: sum of discount^(j-i) values_j over the entries j >= i of the same owner.

    owner (n,) int64; the entries of one owner stand together, in order.
    """
    if not len(values):
        return values.double()

    _, sizes = owner.unique_consecutive(return_counts=True)
    row = torch.arange(len(sizes), device=owner.device).repeat_interleave(sizes)
    place = torch.arange(len(owner), device=owner.device) - (sizes.cumsum(0) - sizes)[row]
    table = values.new_zeros((int(sizes.max()), len(sizes)), dtype=torch.float64)
    table[place, row] = values.double()

    for step in range(len(table) - 2, -1, -1):
        table[step] += discount * table[step + 1]
    return table[place, row]


def _normalised_over_batch(values: Tensor, episodes: Episodes) -> Tensor:
    """(T,) from the values of the generated tokens: mean 0 and standard deviation 1 over those of all ranks."""
    count, total = episodes.all_reduce(torch.stack((values.new_tensor(len(values)), values.sum())), "sum")
    bounded = torch.cat((values, -values)).reshape(2, -1)  # the lowest is minus the highest of -values
    edges = bounded.max(1).values if len(values) else values.new_full((2,), -torch.inf)
    highest, minus_lowest = episodes.all_reduce(edges, "max")

    found = torch.zeros_like(episodes.token_rewards)
    if highest == -minus_lowest or not count:
        return found
    centred = values - total / count
    (square,) = episodes.all_reduce((centred**2).sum()[None], "sum")
    found[episodes.mask] = centred / ((square / count).sqrt() + STD_FLOOR)
    return found
