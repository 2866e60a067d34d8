"""What the learner does with a critic: values before a batch is trained, and its regression to the returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rl.models.packing import Pack
from rl.models.protocol import CriticModel


@torch.no_grad()
def with_values(critic: CriticModel, packs: Iterable[Pack]) -> list[Pack]:
    """The packs with the present values of their generated tokens; all ranks call it with equally many packs."""
    packs = list(packs)
    found = [critic(pack.to(critic.device)) for pack in packs]
    # Only now, because each copy waits for a GPU.
    return [
        pack.with_columns(values=values.to(pack.token_ids.device)) for pack, values in zip(packs, found, strict=True)
    ]


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
    critic: CriticModel, packs: Iterable[Pack], *, global_tokens: int, world_size: int = 1, clip: float | None = None
) -> CriticStats:
    """Add this rank's part of the gradient of the mean over tokens of (V - return)^2 / 2 to `critic`.

    clip: the larger of that loss and the one of V held within `clip` of the value before the batch, as in PPO's
    reference implementation (https://arxiv.org/abs/2005.12729, section 3). Packs carry `values` and `returns`.
    """
    stats = CriticStats()
    for pack in packs:
        pack = pack.to(critic.device)
        assert pack.layout is not None
        assert pack.values is not None and pack.returns is not None, "packs need rl.learner.credit.assign first"

        values = critic(pack)
        loss = (values - pack.returns) ** 2 / 2  # (T,)
        if clip is not None:
            near = pack.values + (values - pack.values).clamp(-clip, clip)
            loss = torch.maximum(loss, (near - pack.returns) ** 2 / 2)
        loss = torch.where(pack.mask, loss, torch.zeros_like(loss))
        (loss.sum() * (world_size / max(1, global_tokens))).backward()

        generated = pack.layout.generated
        returns = pack.returns.index_select(0, generated).double()
        before = pack.values.index_select(0, generated).double()
        parts = [pack.mask.sum(), loss.sum(), returns.sum(), (returns**2).sum(), ((returns - before) ** 2).sum()]
        stats.add(CriticStats(torch.stack([part.detach().double() for part in parts])))
    return stats
