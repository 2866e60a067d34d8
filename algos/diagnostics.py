"""What a batch says about its own staleness, as sums and maxima over tokens.

Nothing but sums and maxima is kept, so packs, micro-batches and ranks can be joined in any order and give the same
numbers. Accumulators live on the device of the data: a pack costs no synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from algos.types import LossInputs, LossResult

LOG_RATIO_BOUND = 50.0  # e^100 still fits a float64: one absurd token must not turn every number into inf


@dataclass
class Diagnostics:
    """Joins packs by `update`, minibatches by `add`, ranks by `all_reduce`; `metrics` gives the means."""

    sums: dict[str, Tensor] = field(default_factory=dict)  # float64 scalars
    maxima: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def update(self, inputs: LossInputs, result: LossResult) -> None:
        """Add one pack."""
        mask = inputs.mask
        log_ratio = (inputs.logp_current - inputs.logp_behavior)[mask].double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio = log_ratio.exp()
        staleness = inputs.staleness[mask].double()
        tokens = {
            "objective": result.per_token[mask].double(),
            "ratio_mean": ratio,
            "ratio_square": ratio**2,
            "kl_behavior": ratio - 1 - log_ratio,  # k3: each term >= 0 (http://joschu.net/blog/kl-approx.html)
            "kl_behavior_k1": -log_ratio,
            "entropy": inputs.entropy[mask].double(),
            "advantage_abs": inputs.advantages[mask].double().abs(),
            "token_staleness": staleness,
        } | {name: values[mask].double() for name, values in result.metrics.items()}
        if inputs.logp_proximal is not None:
            tokens["kl_proximal_k1"] = (inputs.logp_proximal - inputs.logp_current)[mask].double()
        count = mask.sum().double()
        self._join(
            {"tokens": count} | {name: values.sum() for name, values in tokens.items()},
            {"ratio_max": _maximum(ratio), "token_staleness_max": _maximum(staleness)},
        )

    def add(self, other: Diagnostics) -> None:
        self._join(other.sums, other.maxima)

    def all_reduce(self) -> None:
        """Join all ranks, in place; nothing without a process group. Every rank must have had a pack."""
        if not dist.is_initialized():
            return
        for table, how in ((self.sums, dist.ReduceOp.SUM), (self.maxima, dist.ReduceOp.MAX)):
            names = sorted(table)
            joined = torch.stack([table[name] for name in names])
            dist.all_reduce(joined, how)
            table.update(zip(names, joined, strict=True))

    def metrics(self) -> dict[str, float]:
        """Means over generated tokens, as `loss/...`; `loss/ess` is (sum r)^2 / (T sum r^2), 1 when on-policy."""
        sums = {name: float(value) for name, value in self.sums.items()}
        tokens = sums.pop("tokens", 0.0)
        square = sums.pop("ratio_square", 0.0)
        if not tokens:
            return {}
        values = {f"loss/{name}": total / tokens for name, total in sums.items()}
        values["loss/ess"] = sums["ratio_mean"] ** 2 / (tokens * square)
        return values | {f"loss/{name}": float(value) for name, value in self.maxima.items()}

    def _join(self, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value


def _maximum(values: Tensor) -> Tensor:
    """0 for no values: every quantity here is >= 0."""
    return torch.cat((values, values.new_zeros(1))).max()
