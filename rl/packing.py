"""Samples of a shard as packs: flat, padding-free token axes of bounded length, one forward each.

Whatever is normalised over the batch (advantages, the token count) is computed from `shard.rows` before, so how
samples are spread over packs, ranks and minibatches changes no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from rl.messages import Shard

Advantage = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Pack:
    """T tokens of n samples, one sample after another."""

    token_ids: Tensor  # (T,) int64
    position_ids: Tensor  # (T,) int64, restarting at 0 with each sample
    mask: Tensor  # (T,) bool, true on generated tokens
    logp_behavior: Tensor  # (T,) float32
    staleness: Tensor  # (T,) int64, version being trained minus the token's version; 0 where masked
    advantages: Tensor  # (T,) float32
    sample: Tensor  # (T,) int64, 0 .. n - 1
    rewards: Tensor  # (n,) float32
    members: tuple[int, ...]  # row of each sample in shard.rows; empty for a dummy
    logp_proximal: Tensor | None = None  # (T,) float32; `rl.update.with_proximal` adds it

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


def batch_advantages(shard: Shard, estimator: Advantage) -> Tensor:
    """(N,) float32 for `shard.rows`, the same on every rank: each sees the rewards of the whole batch."""
    rewards = torch.tensor([row.reward for row in shard.rows], dtype=torch.float32)
    group = torch.tensor([row.group_id for row in shard.rows], dtype=torch.int64)
    return estimator(rewards, group)


def make_packs(shard: Shard, advantages: Tensor, max_tokens: int, version: int) -> list[Pack]:
    """This rank's samples in packs of at most `max_tokens`; a longer sample gets a pack of its own.

    advantages (N,) belong to shard.rows. `version` is the version being trained. Deterministic.
    """
    offsets = np.concatenate(([0], np.cumsum(shard.lengths, dtype=np.int64)))
    return [
        _pack(shard, [slice(offsets[i], offsets[i + 1]) for i in chosen], chosen, advantages, version)
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
    return Pack(one, one, torch.zeros(1, dtype=torch.bool), number, one, number, one, number, ())


def split_minibatches(shard: Shard, count: int) -> list[Shard]:
    """This rank's part of `count` minibatches of whole groups; the same groups on every rank, in order of rows.

    `rows` stay those of the whole batch (members and advantages index them); `members` and `loss_tokens`, the
    global normaliser, are the minibatch's. Raises ValueError when `count` does not divide the groups.
    """
    groups = list(dict.fromkeys(row.group_id for row in shard.rows))
    if len(groups) % count:
        raise ValueError(f"{len(groups)} groups cannot be split into {count} minibatches")
    part_of = {group: i * count // len(groups) for i, group in enumerate(groups)}
    return [_restrict(shard, {group for group in groups if part_of[group] == part}) for part in range(count)]


def _restrict(shard: Shard, groups: set[int]) -> Shard:
    kept = [i for i, row in enumerate(shard.members) if shard.rows[row].group_id in groups]
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
        loss_tokens=sum(row.loss_tokens for row in shard.rows if row.group_id in groups),
    )


def _pack(shard: Shard, spans: list[slice], chosen: list[int], advantages: Tensor, version: int) -> Pack:
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
        advantages=advantages[members].float().repeat_interleave(lengths),
        sample=torch.arange(len(chosen)).repeat_interleave(lengths),
        rewards=torch.tensor([shard.rows[i].reward for i in members], dtype=torch.float32),
        members=tuple(members),
    )
