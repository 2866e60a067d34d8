"""Proof of a load: is what an engine loaded what the learner published?

There are three tests, from gross to fine:

* the checksum of the bytes received;
* log-probabilities of a fixed prompt against the learner's, within a tolerance: the bytes may be right and the engine's
  tensors wrong;
* closeness: the engine must be nearer to learner(n) than to an older learner(n - k), because at a small learning rate a
  missed update hides below the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl.weights.channel import label
from rl.wire.messages import Version, WeightStatus

Logprobs = npt.NDArray[np.float64]
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Nats, mean |difference| over the probe, by the engine's dtype.

In bfloat16 the largest of 200 probes with equal weights is 0.031, and a single matrix of before the warm start moves
each of ten by 0.138 or more. In float32 it is 2.5e-6 and 0.104 (`python -m experiments.bench probe`). The tolerance
stands between."""
PROBE_TOKENS = 64
EXACT_PROBE_TOKENS = 16
"""The probe's length for later versions where both sides compute in float32: there is hardly a rounding that more would
average out, and each token costs a whole model."""
LONG_PROBES = 3
"""Versions that a learner announces with the long one in any case. These show whether engine and learner compute the
same, and some differences grow with the position (a cast of the rotary frequencies); later ones show that new weights
arrive."""
NOISE_FRACTION = 0.5  # of the tolerance: learners nearer to each other than this are not told apart
KEPT = 16  # published versions remembered


@dataclass(frozen=True)
class Expected:
    """What a generator that has loaded a version must report, as the learner says."""

    version: Version
    checksum: int | None  # of the bytes; None where no host sees them
    probe_ids: tuple[int, ...]
    probe_logp: Logprobs  # (len(probe_ids) - 1,) float64, log-probabilities of probe_ids[1:]; empty: no probe


class LoadProof:
    """`tolerance` in nats, mean |difference|; without `probe` checksums alone are compared."""

    def __init__(self, tolerance: float, *, probe: bool) -> None:
        self._tolerance = tolerance
        self._probe = probe
        self._expected: dict[Version, Expected] = {}

    def add(self, expected: Expected) -> None:
        """Remember a version; the newest 16 are kept."""
        self._expected[expected.version] = expected
        if len(self._expected) > KEPT:
            del self._expected[min(self._expected)]

    def knows(self, version: Version) -> bool:
        """Whether a load of `version` can be judged."""
        return version in self._expected

    def fault(self, status: WeightStatus) -> str | None:
        """Returns None if the load that `status` reports is proven; else one line: generator, version, expected, got,
        fix."""
        expected = self._expected[status.version]
        who = f"generator {status.generator}, weights {label(status.version)}"
        if status.checksum != expected.checksum:
            return (
                f"{who}: checksum of the bytes received {_hex(status.checksum)}, published {_hex(expected.checksum)}; "
                "the transport damaged them: try the other weights.transport and check the host's memory"
            )
        if not self._probe or not expected.probe_logp.size:
            return None

        ids = tuple(status.probe_ids) or expected.probe_ids
        engine = np.array(status.probe_logp, np.float64)
        if engine.size != len(ids) - 1:
            return f"{who}: {engine.size} probe log-probabilities, expected {len(ids) - 1}"

        # The notice may have been of another version: of a shorter probe, or of another text. What comes later in a
        # text changes nothing before it.
        length = min(len(ids), len(expected.probe_ids))
        if length < 2 or ids[:length] != expected.probe_ids[:length]:
            return None
        engine = engine[: length - 1]

        distance = _distance(engine, expected)
        if not distance <= self._tolerance:  # also when it is not a number
            return (
                f"{who}: probe log-probabilities differ by {distance:.4g} nats on average, at most "
                f"{self._tolerance:g} expected (first: engine {engine[0]:.4f}, learner {expected.probe_logp[0]:.4f}); "
                "the engine did not apply the bytes it received: check tied embeddings and the engine's dtype, "
                "or raise weights.probe_tolerance"
            )
        return self._missed_update(who, engine, ids[:length], expected)

    def _missed_update(self, who: str, engine: Logprobs, ids: tuple[int, ...], expected: Expected) -> str | None:
        """Compare with the oldest version kept; engine: log-probabilities of ids[1:].

        By the triangle inequality, an engine within half the gap of the old learner is nearer to it than to the new
        one, whatever the noise.
        """
        comparable = [
            old
            for old in self._expected.values()
            if old.version.timeline == expected.version.timeline and old.probe_ids[: len(ids)] == ids
        ]
        old = min(comparable, key=lambda kept: kept.version)
        gap = _distance(old.probe_logp[: len(ids) - 1], expected)

        to_old = _distance(engine, old)
        if gap <= NOISE_FRACTION * self._tolerance or to_old >= gap / 2:
            return None
        return (
            f"{who}: the engine is nearer to the learner of {label(old.version)} ({to_old:.4g} nats) than to that of "
            f"{label(expected.version)} ({_distance(engine, expected):.4g} nats): it answers with old weights; check "
            "that its load covers every tensor"
        )


def _hex(checksum: int | None) -> str:
    return "none" if checksum is None else f"{checksum:016x}"


def _distance(logp: Logprobs, expected: Expected) -> float:
    """Mean |difference| in nats, over as many as `logp` has."""
    return float(np.mean(np.abs(logp - expected.probe_logp[: logp.size])))
