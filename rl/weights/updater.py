"""Who is told to load weights, and when, and whether they arrived: a state machine without sockets, clock or threads.

Events go in (`publish`, `status`, `peer_died`), actions come out. It is level-triggered: statuses arrive with every
heartbeat and say which version each generator *has*. Whoever is behind the newest version, or on another timeline, is
told to load the newest; versions between are skipped. Invariants:

* nobody is told any version but the newest at that moment, nor told twice while it loads;
* `rolling`: of the generators that already serve this timeline one in sixteen loads at a time (at least one), those
  furthest behind first. One that serves nothing yet (just started, or of another timeline) is told at once: it has no
  capacity to lose;
* a generator that dies while loading, or reports that its load failed, frees the roll at once; it is told again
  when its next incarnation reports;
* who was told and does not load, because the notice was lost, is told again (`RETELL_S`). How long a load may take is
  not decided here: a generator sees for itself whether its load advances, and ends when it does not;
* every load is proven once (`LoadProof`);
* `placement=alternate`: from `take` until `give` nobody is told to load. Everybody who does not rest is told to, and
  again if that was lost. After `give` all who rest are told to load the newest at once, though they may have it: that
  is how they wake. Who has the device meanwhile is not decided here, but by a lock (`turns.py`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl.config.schema import Config
from rl.observe.alarms import limit
from rl.weights.channel import label
from rl.wire.messages import Version, WeightNotice, WeightStatus

RETELL_S = 5.0  # many heartbeats, so that the one that says `loading` has had its time
Logprobs = npt.NDArray[np.float64]
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
ROLLING_SHARE = 16  # one generator in so many is updated at a time


def tolerance(config: Config) -> float:
    """Nats, mean |difference| over the probe.

    In bfloat16 the largest of 200 probes with equal weights is 0.027, and a single matrix of before the warm start
    moves each of ten by 0.145 or more. In float32 it is 2.0e-6 and 0.039 (`python -m experiments.bench probe`). The
    limits stand between.
    """
    exact = config.generator.dtype == "float32"
    return limit(config.alarms, "weights-differ", "float32_nats" if exact else "nats")


def at_once(generators: int, *, rolling: bool) -> int:
    """How many of them are updated at the same time."""
    return max(1, generators // ROLLING_SHARE) if rolling else generators


@dataclass(frozen=True)
class Expected:
    """What a generator that has loaded a version must report, as the learner says."""

    version: Version
    checksum: int | None  # of the bytes; None where no host sees them
    probe_ids: tuple[int, ...]
    probe_logp: Logprobs  # (len(probe_ids) - 1,) float64, log-probabilities of probe_ids[1:]; empty: no probe


class LoadProof:
    """Proof of a load: is what an engine loaded what the learner published?

    There are three tests, from gross to fine:

    * the checksum of the bytes received;
    * log-probabilities of a fixed prompt against the learner's, within a tolerance: the bytes may be right and the
      engine's tensors wrong;
    * closeness: the engine must be nearer to learner(n) than to an older learner(n - k), because at a small learning
      rate a missed update hides below the tolerance.

    `tolerance` in nats, mean |difference|; without `probe` checksums alone are compared.
    """

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

        if (status.checksum is None) != (expected.checksum is None):
            return (
                f"{who}: receipt of the receiver {_hex(status.checksum)}, of the sender {_hex(expected.checksum)}; "
                "both ends of weights.transport give a checksum, or neither does"
            )
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
                "or raise alarms.limits.weights-differ"
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


@dataclass(frozen=True)
class Notify:
    generator: int
    notice: WeightNotice


@dataclass(frozen=True)
class Rest:
    """The learner needs the device of this generator."""

    generator: int


@dataclass(frozen=True)
class Loaded:
    """One load is done and proven; `seconds` from the notice to its report."""

    status: WeightStatus
    seconds: float


@dataclass(frozen=True)
class LoadFailed:
    """A generator could not load; it ends by itself and its next incarnation is told again."""

    generator: int
    message: str


@dataclass(frozen=True)
class Mismatch:
    """Weights did not arrive as published: the run must not go on."""

    generator: int
    message: str


Action = Notify | Rest | Loaded | LoadFailed | Mismatch


@dataclass
class _Load:
    target: Version
    since: float


@dataclass
class _Generator:
    incarnation: int
    version: Version
    load: _Load | None = None
    unproven: WeightStatus | None = None  # reported before `publish` said what to expect
    failed: bool = False
    loading: bool = False
    resting: bool = False
    told_to_rest: float | None = None  # when, since the learner wants the device


class UpdaterCore:
    """`generators`: how many the run has; `tolerance` and `probe`: of the proof."""

    def __init__(self, *, generators: int, rolling: bool, tolerance: float, probe: bool) -> None:
        self._at_once = at_once(generators, rolling=rolling)
        self._proof = LoadProof(tolerance, probe=probe)
        self._newest: WeightNotice | None = None
        self._generators: dict[int, _Generator] = {}
        self._dead: dict[int, int] = {}  # generator -> newest incarnation known to be dead
        self._taken = False  # the learner has the devices, or waits for them
        # Where each generator stands, so that a heartbeat looks at its own sender only.
        self._fresh: set[int] = set()  # behind, and serves nothing yet
        self._behind: set[int] = set()  # serves an older version
        self._updating: set[int] = set()  # was told, and serves an older version meanwhile

    def publish(
        self, now: float, version: Version, checksum: int | None, probe_ids: list[int], probe_logp: list[float]
    ) -> list[Action]:
        """`version`, newer than any before, can be leased. Raises ValueError if it is not newer."""
        if self._newest is not None and version <= self._newest.version:
            raise ValueError(f"version {label(version)} published after {label(self._newest.version)}")
        self._newest = WeightNotice(version, probe_ids)
        self._proof.add(Expected(version, checksum, tuple(probe_ids), np.array(probe_logp, np.float64)))

        actions: list[Action] = []
        for generator in self._generators.values():
            # A receiver takes the newest version, which may be announced to it a moment before it is published here.
            if generator.unproven is not None:
                actions += self._prove(now, generator, generator.unproven)
        for index in self._generators:
            self._place(index)
        return actions + self._advance(now)

    def take(self, now: float) -> list[Action]:
        """The learner needs the devices that it shares with engines."""
        self._taken = True
        return self._advance(now)

    def give(self, now: float) -> list[Action]:
        """The learner has left the devices."""
        self._taken = False
        for index, generator in self._generators.items():
            generator.told_to_rest = None
            if generator.resting:
                generator.load = None  # what it was told before it was told to rest
            self._place(index)
        return self._advance(now)

    def late(self) -> list[int]:
        """Generators that the learner waits for, of those that do not move: one that loads, drains or has not been
        heard of yet is watched by others."""
        return [index for index, each in self._generators.items() if not (each.resting or each.loading)]

    def status(self, now: float, status: WeightStatus) -> list[Action]:
        """A heartbeat. Statuses of earlier incarnations, late on the wire, are ignored."""
        if status.incarnation <= self._dead.get(status.generator, -1):
            return []
        known = self._generators.get(status.generator)
        if known is not None and status.incarnation < known.incarnation:
            return []
        if known is None or status.incarnation > known.incarnation:
            known = _Generator(status.incarnation, Version(-1, -1))
            self._generators[status.generator] = known

        woke = known.resting and not status.resting
        known.resting = status.resting
        known.loading = status.loading

        actions: list[Action] = []
        if status.error:
            if not known.failed:
                actions.append(LoadFailed(status.generator, status.error))
            known.failed = True
            known.load = None
        elif status.version != known.version or woke:
            known.version = status.version
            known.unproven = None
            if self._newest is None or status.version.timeline == self._newest.version.timeline:
                actions += self._prove(now, known, status)

        if known.load is not None and not status.loading and now - known.load.since > RETELL_S:
            known.load = None
        self._place(status.generator)
        return actions + self._advance(now)

    def peer_died(self, now: float, generator: int, incarnation: int) -> list[Action]:
        """The supervisor has fenced this incarnation."""
        self._dead[generator] = max(incarnation, self._dead.get(generator, -1))
        known = self._generators.get(generator)
        if known is not None and known.incarnation <= incarnation:
            del self._generators[generator]
            self._place(generator)
        return self._advance(now)

    def waiting_for(self) -> dict[int, str]:
        """What each generator is at, for a state dump."""
        return {
            index: f"incarnation {generator.incarnation} has {label(generator.version)}"
            + (f", loading {label(generator.load.target)}" if generator.load else "")
            + (", at rest" if generator.resting else "")
            for index, generator in sorted(self._generators.items())
        }

    def _prove(self, now: float, generator: _Generator, status: WeightStatus) -> list[Action]:
        """A generator reports another version than before: judge the load, or wait until it can be judged."""
        if self._newest is None or status.version > self._newest.version:
            generator.unproven = status
            return []

        load = generator.load
        generator.unproven = None
        if load is not None and status.version >= load.target:
            generator.load = None

        if not self._proof.knows(status.version):
            return []
        fault = self._proof.fault(status)
        if fault is not None:
            return [Mismatch(status.generator, fault)]
        return [Loaded(status, now - load.since if load is not None else 0.0)]

    def _place(self, index: int) -> None:
        """Where it stands now."""
        for places in (self._fresh, self._behind, self._updating):
            places.discard(index)
        generator = self._generators.get(index)
        if generator is None or self._newest is None or generator.failed:
            return

        newest = self._newest.version
        if generator.load is not None:
            if self._serves(generator):
                self._updating.add(index)
        elif generator.resting or generator.version < newest or generator.version.timeline != newest.timeline:
            (self._behind if self._serves(generator) else self._fresh).add(index)

    def _advance(self, now: float) -> list[Action]:
        """Tell whoever is to load next, or to rest."""
        if self._taken:
            return self._to_rest(now)
        if self._newest is None:
            return []

        due = self._due()
        for index in due:
            self._generators[index].load = _Load(self._newest.version, now)
            self._place(index)
        return [Notify(index, self._newest) for index in due]

    def _to_rest(self, now: float) -> list[Action]:
        """Tell whoever does not rest, or was told to load and has not begun: it may otherwise wait for the weights of a
        learner that has died meanwhile."""
        due = []
        for index, generator in self._generators.items():
            told = generator.told_to_rest
            rests = generator.resting and generator.load is None
            if not rests and (told is None or now - told > RETELL_S):
                generator.told_to_rest = now
                generator.load = None if generator.resting else generator.load
                due.append(index)
        return [Rest(index) for index in due]

    def _due(self) -> list[int]:
        """Whom to tell now, the furthest behind first."""
        room = self._at_once - len(self._updating)
        due = heapq.nsmallest(room, self._behind, key=self._rank) if room > 0 and self._behind else []
        return sorted([*self._fresh, *due], key=self._rank)

    def _rank(self, index: int) -> tuple[Version, int]:
        return self._generators[index].version, index

    def _serves(self, generator: _Generator) -> bool:
        assert self._newest is not None
        version = generator.version
        return version.timeline == self._newest.version.timeline and version.n >= 0 and not generator.resting
