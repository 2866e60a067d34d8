"""What a batch says about its own staleness, as sums and maxima over tokens.

Nothing but sums and maxima is kept, so packs, micro-batches and ranks can be joined in any order and give the same
numbers. Accumulators live on the device of the data: a pack costs no synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from algos.types import LossInputs, LossResult

LOG_RATIO_BOUND = 50.0  # e^100 still fits a float64: one absurd token must not turn every number into inf
STALENESS_BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, None))  # token staleness, inclusive
QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)
# Log ratios are counted in bins that are finest around 0 (asinh), about 6 % wide beyond.
_BINS = 401
_FINEST = 1e-3
_SPREAD = math.asinh(LOG_RATIO_BOUND / _FINEST)


@dataclass
class Diagnostics:
    """Joins packs by `update`, minibatches by `add`, ranks by `all_reduce`; `metrics` gives the means."""

    sums: dict[str, Tensor] = field(default_factory=dict)  # float64, by bucket of staleness; `histogram` by bin as well
    maxima: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def update(self, inputs: LossInputs, result: LossResult, generated: Tensor) -> None:
        """Add one pack; generated (L,) int64: the places where its mask is set.

        What can be is done to all rows as one: on a GPU a small kernel costs as much as a large one.
        """
        current = inputs.logp_current
        policies = [each for each in (inputs.logp_behavior, inputs.logp_proximal) if each is not None]
        ratios = [current - logp for logp in policies]
        rows = [current, inputs.entropy, inputs.advantages, result.per_token, *result.metrics.values(), *ratios]
        chosen = torch.stack(rows).index_select(1, generated).double()  # (rows, generated tokens)
        logp, entropy, advantages, objective, *further = chosen.unbind()

        own = dict(zip(result.metrics, further, strict=False))
        log_ratio, *steps = chosen[-len(ratios) :].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).unbind()
        ratio = log_ratio.exp()
        staleness = inputs.staleness.index_select(0, generated).double()

        tokens = {
            "tokens": torch.ones_like(ratio),
            "objective": objective,
            "ratio_mean": ratio,
            "ratio_square": ratio**2,
            "kl_behavior": ratio - 1 - log_ratio,  # k3: each term >= 0 (http://joschu.net/blog/kl-approx.html)
            "kl_behavior_k1": -log_ratio,
            "entropy": entropy,
            "advantage_abs": advantages.abs(),
            "token_staleness": staleness,
        }
        tokens |= surprise(logp, entropy) | own

        for step in steps:
            tokens |= {"kl_proximal": step.expm1() - step, "kl_proximal_k1": -step}
        tokens |= _by_sign(advantages, {name: values for name, values in own.items() if name.endswith("_fraction")})

        # No table of bounds and no bincount: both would make the host wait for the device.
        bucket = torch.stack([staleness >= low for low, _ in STALENESS_BUCKETS[1:]]).sum(0)
        sums = _summed(tokens, bucket) | {"histogram": _histogram(log_ratio, bucket)}
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

        `loss/ratio_p95` and its like are quantiles of the ratio. `loss/<name>_fraction_positive` is over tokens of
        positive advantage only, and `stale_2/...` over tokens of that staleness (a bucket without tokens is left out).
        """
        table = {name: value.cpu() for name, value in self.sums.items()}
        if not table or not table["tokens"].any():
            return {}
        values = {f"loss/{name}": value for name, value in _means({k: v.sum(0) for k, v in table.items()}).items()}
        values |= {f"loss/{name}": float(value) for name, value in self.maxima.items()}
        for place, (low, high) in enumerate(STALENESS_BUCKETS):
            if tokens := float(table["tokens"][place]):
                here = _means({name: total[place] for name, total in table.items() if name not in _WHOLE_ONLY})
                label = f"stale_{low}" if low == high else f"stale_{low}_{'up' if high is None else high}"
                values |= {f"{label}/{name}": value for name, value in (here | {"tokens": tokens}).items()}
        return values

    def histograms(self) -> dict[str, list[float]]:
        """`histogram/ratio`: its quantiles 1 % to 99 %, as evenly spread values that stand for all tokens."""
        if "histogram" not in self.sums:
            return {}
        histogram = self.sums["histogram"].sum(0).cpu()
        return {"histogram/ratio": _quantiles(histogram, [percent / 100 for percent in range(1, 100)])}

    def _join(self, sums: dict[str, Tensor], maxima: dict[str, Tensor]) -> None:
        for table, more, both in (
            (self.sums, sums, torch._foreach_add),
            (self.maxima, maxima, torch._foreach_maximum),
        ):
            known = [name for name in more if name in table]
            joined = both([table[name] for name in known], [more[name] for name in known]) if known else ()
            table.update(more | dict(zip(known, joined, strict=True)))


def surprise(logp: Tensor, entropy: Tensor) -> dict[str, Tensor]:
    """What shows, by name, whether this very policy drew the tokens: their surprise is 0 on average. All (T,)."""
    surplus = -logp - entropy
    return {
        "surprise": surplus,
        "surprise_square": surplus**2,
        "surprise_variance": _least_variance(logp, entropy),
    }


def _least_variance(logp: Tensor, entropy: Tensor) -> Tensor:
    """(generated tokens,) what the variance of -log p under the policy is at least, where one token's `logp` is known.

    The other tokens share the probability q = 1 - p and, on average, the surprise that the entropy leaves them, s:

        p (-log p - H)^2 + q (s - H)^2 with s = (H + p log p) / q

    For tokens that are nearly certain this is nearly all of the variance, and a sample without any of the rare ones
    would show none of it.
    """
    other = (-torch.expm1(logp)).clamp_min(1e-12)
    share = ((entropy + logp.exp() * logp) / other).clamp_max(LOG_RATIO_BOUND).maximum(-other.log())
    return logp.exp() * (logp + entropy) ** 2 + other * (share - entropy) ** 2


def _means(sums: dict[str, Tensor]) -> dict[str, float]:
    """The means of the tokens that were summed; `histogram` (bins,) gives quantiles."""
    totals = {name: float(value) for name, value in sums.items() if not value.ndim}
    tokens = totals.pop("tokens")
    square = totals.pop("ratio_square")
    del totals["surprise_square"], totals["surprise_variance"]

    values: dict[str, float] = {}
    for sign in ("positive", "negative"):
        count = totals.pop(f"tokens_{sign}")
        for name in [name for name in totals if name.endswith(f"_fraction_{sign}")]:
            values[name] = totals.pop(name) / max(1.0, count)

    values |= {name: total / tokens for name, total in totals.items()}
    values["ess"] = values["ratio_mean"] ** 2 * tokens / square
    named = zip(QUANTILES, _quantiles(sums["histogram"], QUANTILES), strict=True)
    return values | {f"ratio_p{round(100 * quantile):02d}": value for quantile, value in named}


def _quantiles(histogram: Tensor, wanted: Sequence[float]) -> list[float]:
    """The quantiles of the ratio, from the counts (bins,) of its logarithm."""
    reached = histogram.cumsum(0) / histogram.sum()
    places = torch.searchsorted(reached, torch.tensor(wanted, dtype=torch.float64) - 1e-12)
    centres = _FINEST * torch.sinh(_SPREAD * (2 * places.double() / (_BINS - 1) - 1))
    quantiles: list[float] = centres.exp().tolist()
    return quantiles


def _by_sign(advantages: Tensor, fractions: dict[str, Tensor]) -> dict[str, Tensor]:
    """Clip and mask fractions of tokens to be raised, and of those to be lowered, with which tokens these are."""
    signs = {"positive": (advantages > 0).double(), "negative": (advantages < 0).double()}
    return {f"tokens_{sign}": chosen for sign, chosen in signs.items()} | {
        f"{name}_{sign}": values * chosen for name, values in fractions.items() for sign, chosen in signs.items()
    }


_WHOLE_ONLY = ("objective", "kl_behavior_k1", "kl_proximal_k1", "advantage_abs", "token_staleness")


def _summed(tokens: dict[str, Tensor], bucket: Tensor) -> dict[str, Tensor]:
    """(buckets,) sums of each quantity, whose values (generated tokens,) belong to these buckets."""
    values = torch.stack([*tokens.values()])
    places = bucket + len(STALENESS_BUCKETS) * torch.arange(len(tokens), device=bucket.device)[:, None]
    sums = values.new_zeros(len(tokens) * len(STALENESS_BUCKETS)).index_add(0, places.flatten(), values.flatten())
    return dict(zip(tokens, sums.view(len(tokens), -1).unbind(), strict=True))


def _histogram(log_ratio: Tensor, bucket: Tensor) -> Tensor:
    """(buckets, bins) counts."""
    place = ((torch.asinh(log_ratio / _FINEST) / _SPREAD + 1) * ((_BINS - 1) / 2)).round().long()
    counts = log_ratio.new_zeros(len(STALENESS_BUCKETS) * _BINS)
    return counts.index_add(0, bucket * _BINS + place, torch.ones_like(log_ratio)).view(-1, _BINS)


def _maximum(values: Tensor) -> Tensor:
    """0 for no values: every quantity here is >= 0."""
    return torch.cat((values, values.new_zeros(1))).max()
