"""Who is told to load, under random publishes, loads, deaths and restarts; and the proof of arrival."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from rl.weights.updater import Action, Loaded, LoadFailed, Mismatch, Notify, UpdaterCore
from rl.wire.messages import Version, WeightStatus

NOTHING = Version(-1, -1)


def core(generators: int = 2, *, rolling: bool = True, tolerance: float = 1e-3, probe: bool = True) -> UpdaterCore:
    return UpdaterCore(generators=generators, rolling=rolling, tolerance=tolerance, probe=probe)


def publish(
    updater: UpdaterCore, n: int, now: float = 0.0, timeline: int = 0, logp: list[float] | None = None
) -> list[Action]:
    probe = [] if logp is None else list(range(len(logp) + 1))
    return updater.publish(now, Version(timeline, n), 100 + n, probe, logp or [])


def loaded(generator: int, n: int, incarnation: int = 0, timeline: int = 0, **more: Any) -> WeightStatus:
    return WeightStatus(generator, incarnation, Version(timeline, n), **({"checksum": 100 + n} | more))


def told(actions: list[Action]) -> list[tuple[int, int]]:
    return [(action.generator, action.notice.version.n) for action in actions if isinstance(action, Notify)]


def started(updater: UpdaterCore, count: int, n: int = 0) -> None:
    """`count` generators that have loaded the newest version, `n`."""
    for index in range(count):
        updater.status(0, WeightStatus(index, 0, NOTHING))
    for index in range(count):
        updater.status(0, loaded(index, n))


def test_those_that_serve_nothing_are_told_at_once() -> None:
    updater = core(3)
    assert updater.status(0, WeightStatus(0, 0, NOTHING)) == []
    assert updater.status(0, WeightStatus(1, 0, NOTHING)) == []
    assert told(publish(updater, 0)) == [(0, 0), (1, 0)]
    assert told(updater.status(1, WeightStatus(2, 0, NOTHING))) == [(2, 0)]
    assert updater.status(1, WeightStatus(2, 0, NOTHING)) == []  # a heartbeat while it loads


def test_rolling_tells_one_after_another_and_skips_versions() -> None:
    updater = core(3)
    publish(updater, 0)
    started(updater, 3)
    assert told(publish(updater, 1)) == [(0, 1)]
    assert told(publish(updater, 2)) == []
    assert told(updater.status(1, loaded(0, 1))) == [(1, 2)]  # the furthest behind, and the newest version
    assert told(updater.status(1, loaded(1, 2))) == [(2, 2)]
    assert told(updater.status(1, loaded(2, 2))) == [(0, 2)]
    assert told(updater.status(1, loaded(0, 2))) == []
    assert updater.status(2, loaded(0, 2)) == []


def test_synchronous_training_tells_all_at_once() -> None:
    updater = core(3, rolling=False)
    publish(updater, 0)
    started(updater, 3)
    assert told(publish(updater, 1)) == [(0, 1), (1, 1), (2, 1)]


def test_death_while_loading_frees_the_roll() -> None:
    updater = core(2)
    publish(updater, 0)
    started(updater, 2)
    assert told(publish(updater, 1)) == [(0, 1)]
    assert told(updater.peer_died(1, 0, 0)) == [(1, 1)]
    assert updater.status(1, loaded(0, 0)) == []  # late, from the dead incarnation
    assert told(updater.status(2, WeightStatus(0, 1, NOTHING))) == [(0, 1)]


def test_a_restart_seen_before_its_death_frees_the_roll() -> None:
    updater = core(2)
    publish(updater, 0)
    started(updater, 2)
    publish(updater, 1)
    assert sorted(told(updater.status(1, WeightStatus(0, 1, NOTHING)))) == [(0, 1), (1, 1)]
    assert updater.peer_died(2, 0, 0) == []  # of the incarnation before
    assert all(", loading 0.1" in text for text in updater.waiting_for().values())


def test_a_failed_load_frees_the_roll_and_waits_for_the_next_incarnation() -> None:
    updater = core(2)
    publish(updater, 0)
    started(updater, 2)
    publish(updater, 1)
    actions = updater.status(1, WeightStatus(0, 0, Version(0, 0), error="out of memory"))
    assert actions[0] == LoadFailed(0, "out of memory") and told(actions) == [(1, 1)]
    assert updater.status(1, WeightStatus(0, 0, Version(0, 0), error="out of memory")) == []
    assert told(publish(updater, 2)) == []
    assert told(updater.status(3, WeightStatus(0, 1, NOTHING))) == [(0, 2)]


def test_whoever_does_not_load_is_told_again_and_a_load_that_goes_on_is_left_alone() -> None:
    """A notice may be lost; how long a load may take is for the generator to know."""
    updater = core(1)
    publish(updater, 0)
    assert told(updater.status(0, WeightStatus(0, 4, NOTHING))) == [(0, 0)]
    assert updater.status(1, WeightStatus(0, 4, NOTHING)) == []  # sent before the notice came
    assert updater.status(1000, WeightStatus(0, 4, NOTHING, loading=True)) == []
    assert told(updater.status(1001, WeightStatus(0, 4, NOTHING))) == [(0, 0)]


def test_another_timeline_reloads() -> None:
    updater = core(2)
    updater.status(0, WeightStatus(0, 0, Version(0, 7)))
    updater.status(0, WeightStatus(1, 0, Version(3, 0)))
    assert told(publish(updater, 5, timeline=1)) == [(0, 5), (1, 5)]


def test_a_version_ahead_of_its_publication_is_proven_later() -> None:
    updater = core(1)
    publish(updater, 0)
    updater.status(0, WeightStatus(0, 0, NOTHING))
    assert updater.status(1, loaded(0, 1)) == []  # leased when the slot was ready, before it was announced
    (report,) = publish(updater, 1, now=2.0)
    assert isinstance(report, Loaded) and report.seconds == 2.0

    updater.status(3, loaded(0, 2, checksum=5))
    assert any(isinstance(action, Mismatch) for action in publish(updater, 2))


def test_publishing_backwards_is_an_error() -> None:
    updater = core()
    publish(updater, 3)
    with pytest.raises(ValueError, match=r"0\.3 published after 0\.3"):
        publish(updater, 3)


class Counted(dict[int, Any]):
    """Generators that count how often one of them is looked at."""

    looks = 0

    def __getitem__(self, key: int) -> object:
        self.looks += 1
        return super().__getitem__(key)

    def items(self) -> Any:
        self.looks += len(self)
        return super().items()

    def values(self) -> Any:
        self.looks += len(self)
        return super().values()


def test_a_heartbeat_looks_at_its_sender_and_the_end_of_a_load_once_at_who_is_behind() -> None:
    count = 1024
    updater = core(count)
    publish(updater, 0)
    started(updater, count)
    assert told(publish(updater, 1)) == [(index, 1) for index in range(64)]  # one in sixteen
    updater._generators = looked = Counted(updater._generators)

    assert told(updater.status(1, loaded(500, 0))) == []
    assert looked.looks < 8
    assert told(updater.status(1, loaded(0, 1))) == [(64, 1)]
    assert looked.looks < count + 16


@pytest.mark.parametrize(("count", "at_once"), [(1, 1), (31, 1), (32, 2), (64, 4)])
def test_one_in_sixteen_rolls_at_a_time_and_at_least_one(count: int, at_once: int) -> None:
    updater = core(count)
    publish(updater, 0)
    started(updater, count)
    due = told(publish(updater, 1))
    assert due == [(index, 1) for index in range(at_once)]
    for index in range(at_once, count):
        due += told(updater.status(1, loaded(index - at_once, 1)))
        assert len(due) == index + 1
        assert sum(", loading" in text for text in updater.waiting_for().values()) == at_once


# ---------------------------------------------------------------- proof of arrival


def fault(updater: UpdaterCore, status: WeightStatus) -> str | None:
    faults = [action.message for action in updater.status(1, status) if isinstance(action, Mismatch)]
    return faults[0] if faults else None


def test_wrong_checksum() -> None:
    updater = core(1)
    publish(updater, 0)
    updater.status(0, WeightStatus(0, 0, NOTHING))
    message = fault(updater, loaded(0, 0, checksum=0xBAD))
    assert message is not None and "\n" not in message
    for part in ("generator 0", "0.0", f"{0xBAD:016x}", f"{100:016x}", "weights.transport"):
        assert part in message


@pytest.mark.parametrize(("off", "is_wrong"), [(0.0, False), (0.5, True)])
def test_where_no_host_sees_the_bytes_the_probe_alone_judges(off: float, is_wrong: bool) -> None:
    updater = core(1)
    updater.publish(0.0, Version(0, 0), None, [0, 1], [-1.0])
    updater.status(0, WeightStatus(0, 0, NOTHING))
    assert (fault(updater, loaded(0, 0, checksum=None, probe_logp=[-1.0 + off])) is not None) == is_wrong


@pytest.mark.parametrize(
    ("sent", "received", "told"),
    [
        (100, None, "receipt of the receiver none, of the sender 0000000000000064"),
        (None, 100, "receipt of the receiver 0000000000000064, of the sender none"),
    ],
)
def test_a_channel_with_a_receipt_at_one_end_is_no_damage(sent: int | None, received: int | None, told: str) -> None:
    updater = core(1)
    updater.publish(0.0, Version(0, 0), sent, [0, 1], [-1.0])
    updater.status(0, WeightStatus(0, 0, NOTHING))
    message = fault(updater, loaded(0, 0, checksum=received))
    assert message is not None and told in message and "damaged" not in message
    assert "both ends of weights.transport give a checksum, or neither" in message


@pytest.mark.parametrize("off", [0.5, float("nan"), float("inf")])
def test_wrong_probe(off: float) -> None:
    updater = core(1)
    logp = [-1.0, -2.0, -3.0]
    publish(updater, 0, logp=logp)
    updater.status(0, WeightStatus(0, 0, NOTHING))
    message = fault(updater, loaded(0, 0, probe_logp=[-1.0, -2.0, -3.0 + off]))
    assert message is not None and "probe log-probabilities differ" in message and "generator 0" in message


def test_missing_probe_is_a_mismatch() -> None:
    updater = core(1)
    publish(updater, 0, logp=[-1.0, -2.0])
    updater.status(0, WeightStatus(0, 0, NOTHING))
    assert "0 probe log-probabilities, expected 2" in str(fault(updater, loaded(0, 0)))


def test_an_answer_to_another_probe_is_judged_by_its_checksum_alone() -> None:
    """A notice of the version before may be answered with the newest one, whose probe is another."""
    updater = core(1)
    publish(updater, 0, logp=[-1.0, -2.0])
    updater.status(0, WeightStatus(0, 0, NOTHING))
    assert fault(updater, loaded(0, 0, probe_ids=[7, 8], probe_logp=[-5.0])) is None

    updater.status(0, WeightStatus(0, 1, NOTHING))
    assert "checksum" in str(fault(updater, loaded(0, 0, 1, probe_ids=[7, 8], probe_logp=[-5.0], checksum=0xBAD)))
    updater.status(0, WeightStatus(0, 2, NOTHING))
    assert "differ" in str(fault(updater, loaded(0, 0, 2, probe_ids=[0, 1, 2], probe_logp=[-5.0, -2.0])))


@pytest.mark.parametrize("answered", [2, 3, 8])
def test_an_answer_of_another_length_is_judged_by_what_both_have(answered: int) -> None:
    """A notice of the version before, or after, whose probe is the same text, longer or shorter."""
    updater = core(1)
    publish(updater, 0, logp=[-1.0, -2.0, -3.0, -4.0])
    ids = list(range(answered + 1))
    logp = [-float(place + 1) for place in range(answered)]
    updater.status(0, WeightStatus(0, 0, NOTHING))
    assert fault(updater, loaded(0, 0, probe_ids=ids, probe_logp=logp)) is None

    updater.status(0, WeightStatus(0, 1, NOTHING))
    assert "differ" in str(fault(updater, loaded(0, 0, 1, probe_ids=ids, probe_logp=[-1.5, *logp[1:]])))


def test_probe_can_be_switched_off() -> None:
    updater = core(1, probe=False)
    publish(updater, 0, logp=[-1.0, -2.0])
    updater.status(0, WeightStatus(0, 0, NOTHING))
    assert fault(updater, loaded(0, 0)) is None


def drifting(updater: UpdaterCore, versions: int, drift: float) -> list[np.ndarray]:
    """Learner probes that move by `drift` nats on average per version, in one fixed random direction."""
    generator = np.random.default_rng(0)
    start = -generator.exponential(2, 64)
    direction = generator.choice([-drift, drift], 64)
    learner = [start + n * direction for n in range(versions)]
    for n, logp in enumerate(learner):
        publish(updater, n, logp=logp.tolist())
    return learner


@pytest.mark.parametrize("kept", [True, False])
def test_a_missed_update_is_noticed_where_the_probe_became_shorter(kept: bool) -> None:
    """The versions before had a longer one, of the same text."""
    updater = core(1, tolerance=0.1)
    old, new = [-1.0] * 63, [-1.06] * 15
    publish(updater, 0, logp=old)
    started(updater, 1)
    publish(updater, 1, logp=new)
    message = fault(updater, loaded(0, 1, probe_logp=old[:15] if kept else new))
    assert ("nearer to the learner of" in str(message)) == kept


def test_an_engine_that_kept_old_weights_is_noticed_within_the_tolerance() -> None:
    updater = core(1, tolerance=0.1)
    learner = drifting(updater, 10, drift=0.009)
    noise = np.random.default_rng(1).normal(0, 0.02, 64)
    updater.status(0, WeightStatus(0, 0, NOTHING))
    message = fault(updater, loaded(0, 9, probe_logp=(learner[0] + noise).tolist()))
    assert message is not None and "nearer to the learner of 0.0" in message and "that of 0.9" in message


@pytest.mark.parametrize("drift", [0.0, 1e-4, 1e-3, 0.01, 0.1])
@pytest.mark.parametrize("seed", range(20))
def test_engine_noise_alone_is_no_missed_update(drift: float, seed: int) -> None:
    updater = core(1, tolerance=0.1)
    learner = drifting(updater, 10, drift)
    noise = np.random.default_rng(seed).normal(0, 0.03, 64)
    updater.status(0, WeightStatus(0, 0, NOTHING))
    assert fault(updater, loaded(0, 9, probe_logp=(learner[9] + noise).tolist())) is None


# ---------------------------------------------------------------- random interleavings


class World:
    """Generators that load what they are told (or what is newer by then), die and come back."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = self.random.randint(1, 4)
        self.rolling = self.random.random() < 0.7
        self.core = core(self.count, rolling=self.rolling)
        self.newest = -1
        self.calm = False
        self.now = 0.0
        self.alive = [self.random.random() < 0.8 for _ in range(self.count)]
        self.incarnation = [0] * self.count
        self.version = [-1] * self.count
        self.loading: list[int | None] = [None] * self.count
        self.unreported: list[tuple[int, int]] = []  # deaths that the supervisor has not told yet

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Notify(generator, notice):
                    assert notice.version.n == self.newest, "told something else than the newest"
                    if not self.alive[generator] or (not self.calm and self.random.random() < 0.1):
                        continue  # lost, with its receiver or alone

                    assert self.loading[generator] is None, "told twice"
                    if self.rolling and self.version[generator] >= 0:
                        serving = [i for i in range(self.count) if self.loading[i] is not None and self.version[i] >= 0]
                        assert not [i for i in serving if self.alive[i]], "two that serve load at once"
                    self.loading[generator] = notice.version.n
                case Mismatch(_, message):
                    raise AssertionError(message)

    def step(self) -> None:
        self.now += 0.1
        index = self.random.randrange(self.count)
        choice = self.random.choice(
            ["heartbeat", "load"] if self.calm else ["publish", "heartbeat", "load", "die", "tell"]
        )

        if choice == "publish":
            self.newest += 1
            self.take(publish(self.core, self.newest, self.now))
        elif choice == "die" and self.alive[index]:
            self.alive[index] = False
            self.loading[index] = None
            self.unreported.append((index, self.incarnation[index]))
        elif choice == "tell" and self.unreported:
            self.tell(*self.unreported.pop(0))
        elif choice == "load" and (target := self.loading[index]) is not None and self.alive[index]:
            self.version[index] = self.random.choice([target, self.newest])
            self.loading[index] = None
            self.report(index)
        elif choice == "heartbeat" and self.alive[index]:
            self.report(index)

    def tell(self, index: int, incarnation: int) -> None:
        self.take(self.core.peer_died(self.now, index, incarnation))
        self.incarnation[index] += 1
        self.alive[index] = True
        self.version[index] = -1
        self.loading[index] = None

    def report(self, index: int) -> None:
        n = self.version[index]
        version = NOTHING if n < 0 else Version(0, n)
        checksum = 100 + n if n >= 0 else 0
        loading = self.loading[index] is not None
        status = WeightStatus(index, self.incarnation[index], version, checksum=checksum, loading=loading)
        self.take(self.core.status(self.now, status))

    def settle(self) -> None:
        while self.unreported:
            self.tell(*self.unreported.pop(0))
        self.alive = [True] * self.count
        self.calm = True
        for _ in range(400):
            self.step()


@pytest.mark.parametrize("seed", range(300))
def test_all_reach_the_newest(seed: int) -> None:
    world = World(seed)
    for _ in range(world.random.randint(5, 150)):
        world.step()
    world.newest += 1
    world.take(publish(world.core, world.newest, world.now))
    world.settle()
    assert world.version == [world.newest] * world.count, world.core.waiting_for()
    assert not any(", loading" in text for text in world.core.waiting_for().values())
