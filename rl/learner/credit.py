"""Turns rewards into the advantage, weight and return of every token of a batch.

What spans the batch is shaping, group statistics, the mean of an advantage and the weights of an aggregation. It comes
from `batch_part.rows` or from sums over all ranks, so every rank computes the same numbers whatever samples it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from algos.advantages import Episodes, gae_advantages
from algos.aggregation import sample_weights
from algos.kl import kl_estimate
from algos.rewards import RewardInputs, shape
from rl.learner.algorithm import Algorithm
from rl.models.packing import Pack, minibatch_of
from rl.wire.messages import BatchPart


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step's packs of this rank, and what the sum of their losses is divided by."""

    packs: list[Pack]
    loss_tokens: int  # of all ranks


def all_reduce(values: Tensor, how: Literal["sum", "max"], among: dist.ProcessGroup | None = None) -> Tensor:
    """Combine the values over all ranks, or `among` these, in place; nothing without a process group."""
    if dist.is_initialized():
        dist.all_reduce(values, dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX, among)
    return values


def gathered(own: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """What each rank gives, by rank. All ranks call it together; torch's own exchange of objects would be pickle.

    group: of all ranks as well, for a thread beside that of training.
    """
    if not dist.is_initialized():
        return [own]
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    sizes[dist.get_rank()] = len(own)
    dist.all_reduce(sizes, group=group)

    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else padded[:0]
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group)
    return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes.tolist(), strict=True)]


def kept_rows(batch_part: BatchPart, algorithm: Algorithm) -> Tensor:
    """(N,) bool: the samples that count in the loss."""
    truncated = torch.tensor([row.truncated for row in batch_part.rows])
    return rewarded_rows(batch_part) & ~(truncated & algorithm.mask_truncated)


def rewarded_rows(batch_part: BatchPart) -> Tensor:
    """(N,) bool: the samples whose reward is known. The others are trained nowhere and change no baseline."""
    return torch.tensor([not row.unrewarded for row in batch_part.rows])


def mask_rows(packs: list[Pack], kept: Tensor) -> list[Pack]:
    """The packs without loss tokens in samples that are not kept (N,)."""

    def masked(pack: Pack) -> Pack:
        mask = pack.mask & _at_tokens(kept, pack)
        return pack.with_columns(loss_mask=mask, staleness=pack.staleness * mask)

    return [masked(pack) if pack.members else pack for pack in packs]


def assign(
    batch_part: BatchPart, parts: list[list[Pack]], algorithm: Algorithm, among: dist.ProcessGroup | None = None
) -> list[Minibatch]:
    """The minibatches of a batch, with advantages, token weights, shaped rewards and (for a critic) returns.

    parts: this rank's packs of each minibatch, one at least; they carry `logp_reference` and `values` where the
    algorithm needs them. `batch_part` is the whole batch. All ranks call it together.
    among: ranks that have each sample once between them; None: all.
    """
    packs = [pack for part in parts for pack in part]
    rewards = shaped_rewards(batch_part, algorithm)  # (N,)
    episodes, place = gather_episodes(batch_part, packs, rewards, algorithm, among)
    tokens_here = sum(pack.tokens for pack in packs)
    columns = {
        name: torch.zeros(tokens_here).index_copy(0, place, values)
        for name, values in _credited(episodes, algorithm).items()
    }

    counted = torch.tensor([row.loss_tokens for row in batch_part.rows]) * kept_rows(batch_part, algorithm)  # (N,)
    minibatch = torch.tensor(minibatch_of(batch_part, len(parts)))  # (N,)
    minibatches = []
    end = 0
    for number, part in enumerate(parts):
        tokens = counted * (minibatch == number)
        weights = sample_weights(algorithm.aggregation, tokens, algorithm.max_tokens).float()  # (N,)

        credited = []
        for pack in part:
            begin = end
            end += pack.tokens
            pack = pack.with_columns(**{name: values[begin:end] for name, values in columns.items()})
            if pack.members:
                pack = pack.with_columns(token_weights=_at_tokens(weights, pack))
                pack = replace(pack, rewards=rewards[list(pack.members)].float())
            credited.append(pack)

        minibatches.append(Minibatch(credited, int(tokens.sum())))
    return minibatches


def _credited(episodes: Episodes, algorithm: Algorithm) -> dict[str, Tensor]:
    """(T,) columns, float32. No estimator is asked about a batch in which no reward is known."""
    some = len(episodes.group) > 0
    found = {"advantages": algorithm.estimator(episodes) if some else torch.zeros(0)}
    if algorithm.critic is not None and episodes.values is not None:
        discount = getattr(algorithm.estimator.options, "discount", 1.0)
        advantages = gae_advantages(episodes, discount, algorithm.critic.lam)
        found["returns"] = (advantages + episodes.values).float()
    return found


def _at_tokens(values: Tensor, pack: Pack) -> Tensor:
    """(T,) of one value (N,) per row of the batch."""
    return values[list(pack.members)][pack.sample]


def shaped_rewards(batch_part: BatchPart, algorithm: Algorithm) -> Tensor:
    """(N,) float64, the same on every rank; 0 where none is known."""
    rewarded = rewarded_rows(batch_part)
    rows = [row for row in batch_part.rows if not row.unrewarded]
    if not rows:
        return torch.zeros(len(rewarded), dtype=torch.float64)

    inputs = RewardInputs(
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float64),
        group=torch.tensor([row.group_id for row in rows]),
        tokens=torch.tensor([row.loss_tokens for row in rows]),
        turns=torch.tensor([max(1, len(row.turn_rewards)) for row in rows]),
        truncated=torch.tensor([row.truncated for row in rows]),
        max_tokens=algorithm.max_tokens,
    )
    return torch.zeros(len(rewarded), dtype=torch.float64).masked_scatter(rewarded, shape(inputs, algorithm.shapings))


def gather_episodes(
    batch_part: BatchPart,
    packs: list[Pack],
    rewards: Tensor,
    algorithm: Algorithm,
    among: dist.ProcessGroup | None = None,
) -> tuple[Episodes, Tensor]:
    """What estimators see: rewards per turn and per token, a KL penalty taken off; and (T,) where its tokens stand.

    In the packs a sample stands sequence by sequence. Here its turns and their tokens follow each other in time.
    Samples whose reward is not known are left out, so N, M and T are those of the others.

    rewards (N,) after shaping: what shaping added is earned with a sample's last turn.
    """
    rows = batch_part.rows
    by_turn = [row.turn_rewards or [row.reward] for row in rows]
    turns = torch.tensor([len(earned) for earned in by_turn])  # (N,)
    states = [state for row in rows for state in row.turn_states or [0] * max(1, len(row.turn_rewards))]  # (M,)
    first = turns.cumsum(0) - turns  # (N,) index of each sample's first turn
    turn_rewards = torch.tensor([reward for earned in by_turn for reward in earned], dtype=torch.float64)  # (M,)
    turn_rewards[first + turns - 1] += rewards - torch.tensor([row.reward for row in rows], dtype=torch.float64)

    mask = torch.cat([pack.mask for pack in packs])  # (T,)
    token_turn = torch.cat([_turn_index(pack, first, turns) for pack in packs])  # (T,)

    token_rewards = torch.zeros(len(mask), dtype=torch.float64)
    own = mask.nonzero()[:, 0]
    last = torch.full((len(turn_rewards),), -1).scatter_reduce(0, token_turn[own], own, "amax")  # (M,) -1: elsewhere
    token_rewards[last[last >= 0]] = turn_rewards[last >= 0]

    if algorithm.reward_kl is not None:
        penalty = torch.cat([_reward_penalty(pack, algorithm) for pack in packs])  # (T,)
        token_rewards -= penalty
        turn_rewards -= all_reduce(torch.zeros_like(turn_rewards).index_add(0, token_turn, penalty), "sum", among)

    turn_sample = torch.arange(len(rows)).repeat_interleave(turns)  # (M,)
    sample_in = rewarded_rows(batch_part)  # (N,)
    turn_in = sample_in[turn_sample]  # (M,)
    place = _in_time(token_turn, turn_sample)
    place = place[turn_in[token_turn[place]]]

    episodes = Episodes(
        group=torch.tensor([row.group_id for row in rows])[sample_in],
        turn_rewards=turn_rewards[turn_in],
        turn_sample=(sample_in.cumsum(0) - 1)[turn_sample[turn_in]],
        turn_state=torch.tensor(states)[turn_in],
        token_rewards=token_rewards[place],
        token_turn=(turn_in.cumsum(0) - 1)[token_turn[place]],
        mask=mask[place],
        values=None if algorithm.critic is None else torch.cat([pack.columns["values"] for pack in packs])[place],
        all_reduce=partial(all_reduce, among=among),
    )
    return episodes, place


def _in_time(token_turn: Tensor, turn_sample: Tensor) -> Tensor:
    """(T,) places of the tokens, those of each sample by their turns. Samples stay where they are."""
    sample = turn_sample[token_turn]
    run = torch.zeros_like(sample)
    run[1:] = (sample[1:] != sample[:-1]).cumsum(0)
    return (run * len(turn_sample) + token_turn).argsort(stable=True)


def _turn_index(pack: Pack, first: Tensor, turns: Tensor) -> Tensor:
    """(T,) index into all turns of the batch; a dummy's token, which counts nowhere, is put to turn 0."""
    if not pack.members:
        return torch.zeros_like(pack.turn)
    row = torch.tensor(pack.members)[pack.sample]  # (T,)
    return first[row] + torch.minimum(pack.turn, turns[row] - 1)


def _reward_penalty(pack: Pack, algorithm: Algorithm) -> Tensor:
    """(T,) float64: coef * the KL of the policy that sampled to the reference, 0 outside the mask."""
    kl = algorithm.reward_kl
    assert kl is not None and pack.logp_reference is not None
    estimate = kl_estimate(kl.estimator, pack.logp_behavior.double(), pack.logp_reference.double())
    return kl.coef * torch.where(pack.mask, estimate, 0)
