"""Samples of a shard as packs: flat, padding-free token axes of bounded length, one forward each.

Whatever is normalised over the batch (`credit`: advantages, weights, the token count) is computed from the whole
batch, so how samples are spread over packs, ranks and minibatches changes no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from rl.core.messages import Shard


@dataclass(frozen=True)
class Pack:
    """T tokens of n samples, one sample after another."""

    token_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64, restarting at 0 with each sample
    mask: Tensor  # (T,) bool, true on generated tokens
    logp_behavior: Tensor  # (T,) float32
    staleness: Tensor  # (T,) int64, version being trained minus the token's version; 0 where masked
    advantages: Tensor  # (T,) float32
    weights: Tensor  # (T,) float32 of the token's loss in the sum over the minibatch (`algos.aggregation`)
    sample: Tensor  # (T,) int64, 0 .. n - 1
    turn: Tensor  # (T,) int64, turn within the sample; a prompt or observation belongs to the turn before it, if any
    rewards: Tensor  # (n,) float32
    members: tuple[int, ...]  # row of each sample in shard.rows; empty for a dummy
    logp_proximal: Tensor | None = None  # (T,) float32; `rl.learner.update.with_logp` adds this and the next
    logp_reference: Tensor | None = None  # (T,) float32
    values: Tensor | None = None  # (T,) float32 of the critic before the batch; `rl.learner.critic.with_values` adds it
    returns: Tensor | None = None  # (T,) float32, what the critic regresses to

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def loss_tokens(self) -> int:
        return int(self.mask.sum())

    def to(self, device: torch.device | str) -> Pack:
        moved: dict[str, Any] = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


def make_packs(shard: Shard, max_tokens: int, version: int) -> list[Pack]:
    """This rank's samples in packs of at most `max_tokens`; a longer sample gets a pack of its own.

    `version` is the version being trained. Deterministic. Advantages are 0 and weights 1 until `credit.assign`.
    """
    offsets = np.concatenate(([0], np.cumsum(shard.lengths, dtype=np.int64)))
    return [
        _pack(shard, [slice(offsets[i], offsets[i + 1]) for i in chosen], chosen, version)
        for chosen in assign(shard.lengths, max_tokens)
    ]


def assign(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of the samples of each pack.

    First-fit-decreasing says how many packs are needed; then each sample, longest first, goes to the emptiest of
    that many. Should this overflow one, the first-fit packs stand.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    alone = [[i] for i in order if lengths[i] > max_tokens]
    order = order[len(alone) :]
    fitted: list[list[int]] = []
    loads: list[int] = []
    for i in order:
        where = next((k for k, load in enumerate(loads) if load + lengths[i] <= max_tokens), len(loads))
        if where == len(loads):
            fitted.append([])
            loads.append(0)
        fitted[where].append(i)
        loads[where] += lengths[i]
    balanced: list[list[int]] = [[] for _ in fitted]
    loads = [0] * len(fitted)
    for i in order:
        where = loads.index(min(loads))
        balanced[where].append(i)
        loads[where] += lengths[i]
    packs = balanced if all(load <= max_tokens for load in loads) else fitted
    return alone + [sorted(pack) for pack in packs]


def pad_packs(packs: list[Pack], count: int) -> list[Pack]:
    """Dummies at the end up to `count` packs: every rank must run the same number of forwards under FSDP."""
    if len(packs) > count:
        raise ValueError(f"{len(packs)} packs cannot be padded to {count}")
    return packs + [dummy_pack()] * (count - len(packs))


def dummy_pack() -> Pack:
    """One token that is not generated: it runs through the model and contributes exactly zero."""
    one = torch.zeros(1, dtype=torch.int64)
    number = torch.zeros(1)
    return Pack(one, one, torch.zeros(1, dtype=torch.bool), number, one, number, number, one, one, number, ())


def split_minibatches(shard: Shard, count: int) -> list[Shard]:
    """This rank's part of `count` minibatches of whole groups; the same groups on every rank, in order of rows.

    `rows` stay those of the whole batch (members and advantages index them); `members` and `loss_tokens`, the
    global normaliser, are the minibatch's. Raises ValueError when `count` does not divide the groups.
    """
    part_of = minibatch_of(shard, count)
    return [_restrict(shard, {row for row, place in enumerate(part_of) if place == part}) for part in range(count)]


def minibatch_of(shard: Shard, count: int) -> list[int]:
    """(N,) minibatch of each row. Raises ValueError when `count` does not divide the groups."""
    groups = list(dict.fromkeys(row.group_id for row in shard.rows))
    if len(groups) % count:
        raise ValueError(f"{len(groups)} groups cannot be split into {count} minibatches")
    part_of = {group: i * count // len(groups) for i, group in enumerate(groups)}
    return [part_of[row.group_id] for row in shard.rows]


def _restrict(shard: Shard, rows: set[int]) -> Shard:
    kept = [i for i, row in enumerate(shard.members) if row in rows]
    tokens = np.repeat(np.isin(np.arange(len(shard.members)), kept), shard.lengths)  # (sum T,) bool
    return msgspec.structs.replace(
        shard,
        members=[shard.members[i] for i in kept],
        lengths=[shard.lengths[i] for i in kept],
        turn_starts=[shard.turn_starts[i] for i in kept],
        token_ids=shard.token_ids[tokens],
        loss_mask=shard.loss_mask[tokens],
        logp_behavior=shard.logp_behavior[tokens],
        policy_version=shard.policy_version[tokens],
        loss_tokens=sum(shard.rows[row].loss_tokens for row in rows),
    )


def _pack(shard: Shard, spans: list[slice], chosen: list[int], version: int) -> Pack:
    def gather(values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate([values[span] for span in spans])).to(dtype)

    members = [shard.members[i] for i in chosen]
    lengths = torch.tensor([shard.lengths[i] for i in chosen])
    mask = gather(shard.loss_mask, torch.bool)
    return Pack(
        token_ids=gather(shard.token_ids, torch.int64),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        mask=mask,
        logp_behavior=gather(shard.logp_behavior, torch.float32),
        staleness=(version - gather(shard.policy_version, torch.int64)) * mask,
        advantages=torch.zeros(len(mask)),
        weights=torch.ones(len(mask)),
        sample=torch.arange(len(chosen)).repeat_interleave(lengths),
        turn=torch.cat([_turns(shard.lengths[i], shard.turn_starts[i]) for i in chosen]),
        rewards=torch.tensor([shard.rows[i].reward for i in members], dtype=torch.float32),
        members=tuple(members),
    )


def _turns(length: int, starts: list[int]) -> Tensor:
    """(length,) int64: turns that have started at each token, less one; 0 before the first."""
    begun = torch.zeros(length, dtype=torch.int64)
    begun[[start for start in starts if start < length]] = 1
    return (begun.cumsum(0) - 1).clamp(min=0)
