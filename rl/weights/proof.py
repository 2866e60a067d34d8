"""Proof of arrival: is what an engine loaded what the learner published?

Three tests, from gross to fine: the checksum of the bytes received; log-probabilities of a fixed prompt against
the learner's within a tolerance (the bytes may be right and the engine's tensors wrong); and closeness: the
engine must be nearer to learner(n) than to an older learner(n - k), because at a small learning rate a missed
update hides below the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rl.core.messages import Version, WeightStatus
from rl.weights.base import label

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}  # nats, mean |difference|; measured: 1e-5 and 0.02
NOISE_FRACTION = 0.2  # of the tolerance: learners nearer to each other than this are not told apart
KEPT = 16  # published versions remembered


@dataclass(frozen=True)
class Published:
    """What the learner said of one version."""

    version: Version
    checksum: int
    probe_ids: tuple[int, ...]
    probe_logp: np.ndarray  # (len(probe_ids) - 1,) float64, log-probabilities of probe_ids[1:]; empty: no probe


class History:
    """The newest versions published, by version."""

    def __init__(self, tolerance: float, *, probe: bool) -> None:
        self._tolerance, self._probe = tolerance, probe
        self._published: dict[Version, Published] = {}

    def add(self, published: Published) -> None:
        self._published[published.version] = published
        if len(self._published) > KEPT:
            del self._published[min(self._published)]

    def knows(self, version: Version) -> bool:
        return version in self._published

    def fault(self, status: WeightStatus) -> str | None:
        """None if the load that `status` reports is proven; else one line: generator, version, expected, got, fix."""
        published = self._published[status.version]
        who = f"generator {status.generator}, weights {label(status.version)}"
        if status.checksum != published.checksum:
            return (
                f"{who}: checksum of the bytes received {status.checksum:016x}, published {published.checksum:016x}; "
                "the transport damaged them: try the other weights.transport and check the host's memory"
            )
        if not self._probe or not published.probe_logp.size:
            return None
        engine = np.array(status.probe_logp, np.float64)
        if engine.shape != published.probe_logp.shape:
            return f"{who}: {engine.size} probe log-probabilities, expected {published.probe_logp.size}"
        distance = _distance(engine, published)
        if not distance <= self._tolerance:  # also when it is not a number
            return (
                f"{who}: probe log-probabilities differ by {distance:.4g} nats on average, at most "
                f"{self._tolerance:g} expected (first: engine {engine[0]:.4f}, learner {published.probe_logp[0]:.4f}); "
                "the engine did not apply the bytes it received: check tied embeddings and the engine's dtype, "
                "or raise weights.probe_tolerance"
            )
        return self._missed_update(who, engine, published, distance)

    def _missed_update(self, who: str, engine: np.ndarray, published: Published, distance: float) -> str | None:
        """Compare with the oldest version kept. By the triangle inequality, an engine within half the gap of the
        old learner is nearer to it than to the new one, whatever the noise."""
        candidates = [
            old
            for version, old in self._published.items()
            if version.epoch == published.version.epoch
            and version < published.version
            and old.probe_ids == published.probe_ids
        ]
        if not candidates:
            return None
        old = min(candidates, key=lambda kept: kept.version)
        gap = _distance(old.probe_logp, published)
        to_old = _distance(engine, old)
        if gap <= NOISE_FRACTION * self._tolerance or to_old >= gap / 2:
            return None
        return (
            f"{who}: the engine is nearer to the learner of {label(old.version)} ({to_old:.4g} nats) than to that of "
            f"{label(published.version)} ({distance:.4g} nats): it answers with old weights; check that its load "
            "covers every tensor"
        )


def _distance(logp: np.ndarray, published: Published) -> float:
    return float(np.mean(np.abs(logp - published.probe_logp)))
