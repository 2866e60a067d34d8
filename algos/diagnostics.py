"""What a batch says about its own staleness, as sums and maxima over tokens.

Nothing but sums and maxima is kept, so packs, micro-batches and ranks can be joined in any order and give the same
numbers. Accumulators live on the device of the data: a pack costs no synchronisation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from algos.types import LossInputs, LossResult

LOG_RATIO_BOUND = 50.0  # e^100 still fits a float64: one absurd token must not turn every number into inf
STALENESS_BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, None))  # token staleness, inclusive
QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)
_BINS, _FINEST = 401, 1e-3  # log ratios in bins that are finest around 0 (asinh), about 6 % wide beyond
_SPREAD = math.asinh(LOG_RATIO_BOUND / _FINEST)


@dataclass
class Diagnostics:
    """Joins packs by `update`, minibatches by `add`, ranks by `all_reduce`; `metrics` gives the means."""

    sums: dict[str, Tensor] = field(default_factory=dict)  # float64: scalars, and vectors by bin or bucket
    maxima: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def update(self, inputs: LossInputs, result: LossResult) -> None:
        """Add one pack."""
        mask = inputs.mask
        log_ratio = (inputs.logp_current - inputs.logp_behavior)[mask].double().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        ratio = log_ratio.exp()
        staleness = inputs.staleness[mask].double()
        advantages = inputs.advantages[mask]
        own = {name: values[mask].double() for name, values in result.metrics.items()}
        tokens = {
            "objective": result.per_token[mask].double(),
            "ratio_mean": ratio,
            "ratio_square": ratio**2,
            "kl_behavior": ratio - 1 - log_ratio,  # k3: each term >= 0 (http://joschu.net/blog/kl-approx.html)
            "kl_behavior_k1": -log_ratio,
            "entropy": inputs.entropy[mask].double(),
            "advantage_abs": advantages.double().abs(),
            "token_staleness": staleness,
        } | own
        if inputs.logp_proximal is not None:
            tokens["kl_proximal_k1"] = (inputs.logp_proximal - inputs.logp_current)[mask].double()
        sums = {"tokens": mask.sum().double()} | {name: values.sum() for name, values in tokens.items()}
        sums |= _by_sign(advantages, {name: values for name, values in own.items() if name.endswith("_fraction")})
        sums |= _by_staleness(staleness, tokens)
        sums["histogram"] = _histogram(log_ratio)
        self._join(sums, {"ratio_max": _maximum(ratio), "token_staleness_max": _maximum(staleness)})

    def add(self, other: Diagnostics) -> None:
        self._join(other.sums, other.maxima)

    def all_reduce(self) -> None:
        """Join all ranks, in place; nothing without a process group. Every rank must have had a pack."""
        if not dist.is_initialized():
            return
        for table, how in ((self.sums, dist.ReduceOp.SUM), (self.maxima, dist.ReduceOp.MAX)):
            names = sorted(table)
            joined = torch.cat([table[name].flatten() for name in names])
            dist.all_reduce(joined, how)
            parts = joined.split([table[name].numel() for name in names])
            table.update({name: part.view(table[name].shape) for name, part in zip(names, parts, strict=True)})

    def metrics(self) -> dict[str, float]:
        """Means over generated tokens, as `loss/...`; `loss/ess` is (sum r)^2 / (T sum r^2), 1 when on-policy.

        `loss/ratio_p95` and its like are quantiles of the ratio, `loss/<name>_fraction_positive` is over tokens of
        positive advantage only, and `stale_2/...` over tokens of that staleness (a bucket without tokens is left out).
        """
        sums = {name: float(value) for name, value in self.sums.items() if not value.ndim}
        tokens = sums.pop("tokens", 0.0)
        if not tokens:
            return {}
        square = sums.pop("ratio_square")
        values: dict[str, float] = {}
        for sign in ("positive", "negative"):
            count = sums.pop(f"tokens_{sign}")
            for name in [name for name in sums if name.endswith(f"_fraction_{sign}")]:
                values[f"loss/{name}"] = sums.pop(name) / max(1.0, count)
        values |= {f"loss/{name}": total / tokens for name, total in sums.items()}
        values["loss/ess"] = sums["ratio_mean"] ** 2 / (tokens * square)
        values |= {f"loss/{name}": float(value) for name, value in self.maxima.items()}
        return values | self._quantiles() | self._staleness()

    def _quantiles(self) -> dict[str, float]:
        reached = self.sums["histogram"].cumsum(0).cpu() / self.sums["histogram"].sum().cpu()
        places = torch.searchsorted(reached, torch.tensor(QUANTILES, dtype=torch.float64) - 1e-12)
        centres = _FINEST * torch.sinh(_SPREAD * (2 * places.double() / (_BINS - 1) - 1))
        named = zip(QUANTILES, centres.exp().tolist(), strict=True)
        return {f"loss/ratio_p{round(100 * quantile):02d}": value for quantile, value in named}

    def _staleness(self) -> dict[str, float]:
        by_bucket = {
            name.removeprefix("stale/"): v.tolist() for name, v in self.sums.items() if name.startswith("stale/")
        }
        values: dict[str, float] = {}
        for place, (low, high) in enumerate(STALENESS_BUCKETS):
            tokens = by_bucket["tokens"][place]
            if not tokens:
                continue
            here = {name: totals[place] / tokens for name, totals in by_bucket.items() if name != "tokens"}
            here["ess"] = here["ratio_mean"] ** 2 / here.pop("ratio_square")
            label = f"stale_{low}" if low == high else f"stale_{low}_{'up' if high is None else high}"
            values |= {f"{label}/{name}": value for name, value in (here | {"tokens": tokens}).items()}
        return values

    def _join(self, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value) if name in self.maxima else value


def _by_sign(advantages: Tensor, fractions: dict[str, Tensor]) -> dict[str, Tensor]:
    """Clip and mask fractions of tokens to be raised, and of those to be lowered."""
    signs = {"positive": (advantages > 0).double(), "negative": (advantages < 0).double()}
    sums = {f"tokens_{sign}": chosen.sum() for sign, chosen in signs.items()}
    return sums | {
        f"{name}_{sign}": (values * chosen).sum()
        for name, values in fractions.items()
        for sign, chosen in signs.items()
    }


def _by_staleness(staleness: Tensor, tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    """(buckets,) sums by `STALENESS_BUCKETS`."""
    firsts = staleness.new_tensor([low for low, _ in STALENESS_BUCKETS[1:]])
    bucket = torch.bucketize(staleness, firsts, right=True)
    chosen = {"tokens": torch.ones_like(staleness)} | {name: tokens[name] for name in _BY_STALENESS if name in tokens}
    zeros = staleness.new_zeros(len(STALENESS_BUCKETS))
    return {f"stale/{name}": zeros.index_add(0, bucket, values) for name, values in chosen.items()}


_BY_STALENESS = (
    "ratio_mean", "ratio_square", "kl_behavior", "kl_proximal_k1", "entropy",
    "clip_fraction", "mask_fraction", "correction_masked_fraction",
)  # fmt: skip


def _histogram(log_ratio: Tensor) -> Tensor:
    """(bins,) counts."""
    place = ((torch.asinh(log_ratio / _FINEST) / _SPREAD + 1) * ((_BINS - 1) / 2)).round().long()
    return torch.bincount(place, minlength=_BINS).double()


def _maximum(values: Tensor) -> Tensor:
    """0 for no values: every quantity here is >= 0."""
    return torch.cat((values, values.new_zeros(1))).max()
