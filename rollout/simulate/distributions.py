"""Distributions as inverse cumulative functions, so that every draw is a pure function of a seed.

A sample keeps its length, whatever the schedule does with it. So two scenarios are compared on the same work, and a
sample that is cut off and tried again is as long as it was.
"""

from __future__ import annotations

import math
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
    """Measured values, ascending; between two of them by linear interpolation."""

    values: tuple[float, ...]

    def at(self, z: float) -> float:
        position = _STANDARD.cdf(z) * (len(self.values) - 1)
        low = min(int(position), len(self.values) - 2) if len(self.values) > 1 else 0
        high = min(low + 1, len(self.values) - 1)

        return self.values[low] + (position - low) * (self.values[high] - self.values[low])

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


Distribution = Constant | Gaussian | LogNormal | Empirical
