"""What the routers of a mixture of experts do in a batch: how even the load is, and what replay is worth."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl.learner.credit import all_reduce
from rl.models.packing import Pack
from rl.models.protocol import PolicyModel
from rl.models.routers import Routing
from rl.wire.columns import COLUMNS, ROUTED_EXPERTS


@dataclass
class RoutingStats:
    """Sums of one rank until `all_reduce`; then of all, identically. None for a dense model."""

    sums: Routing | None = None

    def add(self, routing: Routing | None) -> None:
        if self.sums is None or routing is None:
            self.sums = self.sums or routing
        else:
            self.sums = Routing(*(one + other for one, other in zip(self.sums, routing, strict=True)))

    def all_reduce(self) -> None:
        if self.sums is not None:
            self.sums = Routing(*(all_reduce(each.double(), "sum") for each in self.sums))

    def metrics(self) -> dict[str, float]:
        """Of all routers of the model, where they stand before a token that is trained.

        `router/largest` and `router/smallest` are the most and the least that an expert had; 1 is an even load.
        `router/entropy` is a share of the largest possible one. `router/differ` is the share of tokens for which a
        router would have chosen other experts than it was told.
        """
        if self.sums is None:
            return {}
        experts, entropy, differ, tokens = (each.double().cpu() for each in self.sums)
        load = experts / experts.mean(1, keepdim=True)
        seen = float(tokens.sum())
        return {
            "router/entropy": float(entropy.sum()) / seen / math.log(experts.shape[1]),
            "router/largest": float(load.max()),
            "router/smallest": float(load.min()),
            "router/differ": float(differ.sum()) / seen,
        }


def without_routing(pack: Pack, kept: Tensor | None = None) -> Pack:
    """The pack with routed experts for the tokens (T,) `kept` alone: at all others routers choose by themselves."""
    if ROUTED_EXPERTS not in pack.columns:
        return pack
    column = pack.columns[ROUTED_EXPERTS]
    nothing = torch.full_like(column, COLUMNS[ROUTED_EXPERTS].masked)
    return pack.with_columns(
        **{ROUTED_EXPERTS: nothing if kept is None else torch.where(kept[:, None, None], column, nothing)}
    )


@torch.no_grad()
def replay_gap(policy: PolicyModel, packs: Iterable[Pack], temperature: float) -> dict[str, float]:
    """Mean difference to the engine's log-probabilities in nats, with its choices of experts and without, on one pack
    of each rank: what replay is worth. Nothing for a policy that does not replay; all ranks call it together."""
    if ROUTED_EXPERTS not in policy.reads:
        return {}

    pack = next(iter(packs))
    sums = []
    for each in (pack, without_routing(pack)):
        logp = policy(each.to(policy.device), temperature=temperature).logp.to(pack.token_ids.device)
        sums.append((logp - pack.logp_behavior)[pack.mask].abs().double().sum())
    totals = all_reduce(torch.stack([*sums, pack.mask.sum().double()]), "sum")
    if not totals[2]:
        return {}
    with_replay, without, _ = (totals / totals[2]).tolist()
    return {"router/gap": with_replay, "router/gap_without_replay": without}
