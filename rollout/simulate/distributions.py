"""Distributions as inverse cumulative functions, so that every draw is a pure function of a seed.

A sample keeps its length, whatever the schedule does with it. So two scenarios are compared on the same work, and a
sample that is cut off and tried again is as long as it was.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate, pairwise
from statistics import NormalDist

from msgspec import Struct

_MASK = (1 << 64) - 1
_STANDARD = NormalDist()
_normal = _STANDARD.inv_cdf


def uniform(seed: int, draw: int) -> float:
    """Number `draw` of the stream `seed`, in (0, 1): splitmix64."""
    z = (seed + (draw + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
    return (((z ^ z >> 31) >> 11) + 0.5) * 2.0**-53


def normal(seed: int, draw: int) -> float:
    """Standard normal."""
    return _normal(uniform(seed, draw))


class Constant(Struct, frozen=True, tag="constant"):
    """The same value at every draw."""

    value: float = 0.0

    def at(self, z: float) -> float:
        return self.value

    @property
    def mean(self) -> float:
        return self.value


class Gaussian(Struct, frozen=True, tag="gaussian"):
    """Clipped at 0, as the paper injects environment latency."""

    mu: float
    sigma: float

    def at(self, z: float) -> float:
        return max(0.0, self.mu + self.sigma * z)

    @property
    def mean(self) -> float:
        """The mean of the clipped distribution."""
        if self.sigma == 0:
            return self.mu
        ratio = self.mu / self.sigma
        return self.mu * _STANDARD.cdf(ratio) + self.sigma * _STANDARD.pdf(ratio)


class LogNormal(Struct, frozen=True, tag="lognormal"):
    """`mean` of the values, `sigma` of their logarithms; values above `limit` are cut to it."""

    mean: float
    sigma: float
    limit: float = math.inf

    def at(self, z: float) -> float:
        return min(self.limit, self.mean * math.exp(self.sigma * z - self.sigma * self.sigma / 2))


class Empirical(Struct, frozen=True, tag="empirical"):
    """Measured values, by linear interpolation between two that follow one another. A long run has measured millions,
    of few different ones."""

    values: tuple[float, ...]
    """Those that differ, ascending."""
    ends: tuple[int, ...]
    """How many were measured up to each of them, itself included."""

    @classmethod
    def of(cls, counts: Mapping[float, int]) -> Empirical:
        """counts: how often each value was measured."""
        values = tuple(sorted(counts))
        return cls(values, tuple(accumulate(counts[value] for value in values)))

    def at(self, z: float) -> float:
        last = self.ends[-1] - 1
        position = _STANDARD.cdf(z) * last
        low = min(int(position), max(0, last - 1))
        below = self._measured(low)

        return below + (position - low) * (self._measured(min(low + 1, last)) - below)

    def _measured(self, place: int) -> float:
        return self.values[bisect_right(self.ends, place)]

    @property
    def mean(self) -> float:
        counts = (end - begin for begin, end in pairwise((0, *self.ends)))
        return sum(value * count for value, count in zip(self.values, counts, strict=True)) / self.ends[-1]


Distribution = Constant | Gaussian | LogNormal | Empirical
