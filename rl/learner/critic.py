"""The critic of PPO: a transformer of its own with a value head, packed and FSDP-sharded like the policy.

V_t is the value of the context before generated token t, so it stands at t like the token's log-probability. The head
starts at zero: the first advantages are then the rewards themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl.models.packing import Pack
from rl.models.policy import PackedModel, Placing, Policy, load_packed


class Critic(PackedModel):
    """`model` is a decoder without a head (transformers' `get_decoder()`)."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__(decoder)
        self.head = nn.Linear(self.model.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, token_ids: Tensor, position_ids: Tensor, *, select: Tensor) -> Tensor:
        """(T,) float32 values of the contexts before the selected tokens, 0 elsewhere.

        token_ids, position_ids (T,) int64 and select (T,) bool as for `Policy.forward`.
        """
        targets = (select & (position_ids > 0)).nonzero()[:, 0]  # (S,)
        with self.autocast(token_ids.device.type):
            hidden = self.contexts(token_ids, position_ids, targets)  # (S, H)
            values = self.head(hidden)[:, 0].float()  # (S,)
        return torch.zeros(len(token_ids), device=token_ids.device).index_copy(0, targets, values)


def load_critic(folder: str | Path, *, attention: str | None = None, **placing: Unpack[Placing]) -> Critic:
    """A critic on the model in `folder`, loaded and placed like a policy. Raises ValueError."""
    return load_packed(folder, lambda model: Critic(Policy(model).decoder), attention, **placing)


@torch.no_grad()
def with_values(critic: Critic, packs: Iterable[Pack]) -> list[Pack]:
    """The packs with the present values of their generated tokens; all ranks call it with equally many packs."""
    device = next(critic.parameters()).device
    done = []
    for pack in packs:
        moved = pack.to(device)
        values = critic(moved.token_ids, moved.position_ids, select=moved.mask)
        done.append(pack.with_columns(values=values.to(pack.token_ids.device)))
    return done


@dataclass
class CriticStats:
    """Sums over tokens, (5,) float64: tokens, loss, return, return^2, (return - value before the batch)^2."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    def add(self, other: CriticStats) -> None:
        self.sums = self.sums + other.sums if len(self.sums) else other.sums

    def all_reduce(self) -> None:
        if len(self.sums) and dist.is_initialized():
            dist.all_reduce(self.sums)

    def metrics(self) -> dict[str, float]:
        """`critic/explained_variance`: 1 - the squared error of the values over the variance of the returns."""
        if not len(self.sums) or not self.sums[0]:
            return {}
        tokens, loss, total, square, error = self.sums.tolist()
        variance = square / tokens - (total / tokens) ** 2
        known = {} if variance <= 1e-12 else {"critic/explained_variance": 1 - error / tokens / variance}
        return {"critic/loss": loss / tokens, "critic/return": total / tokens} | known


def accumulate_critic(
    critic: Critic, packs: Iterable[Pack], *, global_tokens: int, world_size: int = 1, clip: float | None = None
) -> CriticStats:
    """Add this rank's part of the gradient of the mean over tokens of (V - return)^2 / 2 to `critic`.

    clip: the larger of that loss and the one of V held within `clip` of the value before the batch, as in PPO's
    reference implementation (https://arxiv.org/abs/2005.12729, section 3). Packs carry `values` and `returns`.
    """
    device = next(critic.parameters()).device
    stats = CriticStats()
    for pack in packs:
        pack = pack.to(device)
        assert pack.values is not None and pack.returns is not None, "packs need rl.learner.credit.assign first"

        values = critic(pack.token_ids, pack.position_ids, select=pack.mask)
        loss = (values - pack.returns) ** 2 / 2  # (T,)
        if clip is not None:
            near = pack.values + (values - pack.values).clamp(-clip, clip)
            loss = torch.maximum(loss, (near - pack.returns) ** 2 / 2)
        loss = torch.where(pack.mask, loss, torch.zeros_like(loss))
        (loss.sum() * (world_size / max(1, global_tokens))).backward()

        returns = pack.returns[pack.mask].double()
        before = pack.values[pack.mask].double()
        parts = [pack.mask.sum(), loss.sum(), returns.sum(), (returns**2).sum(), ((returns - before) ** 2).sum()]
        stats.add(CriticStats(torch.stack([part.detach().double() for part in parts])))
    return stats
