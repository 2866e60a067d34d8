"""`placement=alternate`: nobody is on a device at the same time, and everybody has a turn, whatever dies or is lost."""

from __future__ import annotations

import random
import signal
import subprocess
import sys

import pytest
from msgspec.structs import replace

from rl.weights.turns import Turns
from rl.weights.updater import Action, Loaded, Notify, Rest
from rl.wire.messages import Version, WeightNotice, WeightStatus
from tests.conftest import MakeRun
from tests.rl.weights.test_updater import NOTHING, core, loaded, publish, started, told

HOLD = """
import sys, time
from rl.weights.turns import Turns
from rl.wire.run import RunFile
turns = Turns(RunFile.load(sys.argv[1]), alone=sys.argv[2] == "alone")
print(turns.take(), flush=True)
time.sleep(600)
"""


def test_engines_share_their_turn_and_the_learner_does_not(make_run: MakeRun) -> None:
    run = make_run()
    learner, *engines = Turns(run, alone=True), Turns(run, alone=False), Turns(run, alone=False)
    assert all(engine.take() for engine in engines) and not learner.take() and not learner.has
    engines[0].give()
    assert not learner.take()
    engines[1].give()
    assert learner.take() and learner.take() and not engines[0].take()
    learner.give()
    assert engines[0].take()
    for each in (learner, *engines):
        each.close()


@pytest.mark.parametrize("how", ["alone", "together"])
def test_a_turn_ends_with_its_process(make_run: MakeRun, how: str) -> None:
    run = make_run()
    command = [sys.executable, "-c", HOLD, str(run.folder), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        other = Turns(run, alone=how == "together")
        assert not other.take()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert other.take()
        other.close()


def test_all_are_told_to_rest_once_and_then_to_load_though_they_have_it() -> None:
    updater = core(3)
    publish(updater, 0)
    started(updater, 3)
    assert updater.take(1) == [Rest(0), Rest(1), Rest(2)]
    assert updater.status(2, loaded(0, 0)) == []  # sent before the notice came
    assert sorted(updater.late()) == [0, 1, 2]
    for index in range(3):
        updater.status(2, loaded(index, 0, resting=True))
    assert updater.late() == []
    assert publish(updater, 1) == []
    assert told(updater.give(3)) == [(0, 1), (1, 1), (2, 1)]  # at once: nobody has capacity to lose


def test_one_that_rests_is_woken_by_the_version_that_it_has_and_proves_it_again() -> None:
    """A learner that was killed trains again what it had published."""
    updater = core(1)
    updater.take(0)
    assert updater.status(0, loaded(0, 4, resting=True)) == []
    publish(updater, 4)
    assert told(updater.give(1)) == [(0, 4)]
    assert updater.status(2, loaded(0, 4, resting=True, loading=True)) == []
    (report,) = updater.status(3, loaded(0, 4))
    assert isinstance(report, Loaded)
    assert updater.status(4, loaded(0, 4)) == []


def test_who_comes_during_a_turn_is_told_to_rest_and_who_does_not_is_told_again() -> None:
    updater = core(2)
    publish(updater, 0)
    updater.take(0)
    assert updater.status(1, WeightStatus(1, 0, NOTHING)) == [Rest(1)]
    assert updater.status(2, WeightStatus(1, 0, NOTHING)) == []
    assert updater.status(1000, WeightStatus(1, 0, NOTHING)) == [Rest(1)]
    assert updater.peer_died(1001, 1, 0) == [] and updater.late() == []
    assert updater.status(1002, WeightStatus(1, 1, NOTHING)) == [Rest(1)]


def test_the_next_turn_is_asked_for_at_once() -> None:
    updater = core(1)
    publish(updater, 0)
    started(updater, 1)
    assert updater.take(1) == [Rest(0)]
    updater.status(1, loaded(0, 0, resting=True))
    updater.give(1)
    updater.status(1, loaded(0, 0))
    assert updater.take(1) == [Rest(0)]


def test_a_notice_to_load_that_came_too_late_is_taken_back() -> None:
    """The next turn begins before it has begun to load: the weights may be gone when it can."""
    updater = core(1)
    publish(updater, 0)
    started(updater, 1)
    updater.take(1)
    updater.status(1, loaded(0, 0, resting=True))
    publish(updater, 1)
    assert told(updater.give(2)) == [(0, 1)]
    assert updater.take(3) == [Rest(0)]
    assert updater.status(4, loaded(0, 0, resting=True)) == []
    assert told(updater.give(5)) == [(0, 1)]


def test_one_that_loads_is_not_late() -> None:
    updater = core(2)
    publish(updater, 0)
    started(updater, 2)
    updater.take(1)
    updater.status(2, loaded(0, 0, loading=True))
    assert updater.late() == [1]


def test_a_notice_from_before_the_turn_does_not_count_after_it() -> None:
    """It was told to load and then to rest before it did: it is told again at once, with the newest."""
    updater = core(1)
    publish(updater, 0)
    started(updater, 1)
    assert told(publish(updater, 1)) == [(0, 1)]
    updater.take(1)
    updater.status(2, loaded(0, 0, resting=True))
    publish(updater, 2)
    assert told(updater.give(3)) == [(0, 2)]


# ---------------------------------------------------------------- random interleavings


class Lock:
    """The kernel's, in one process."""

    def __init__(self) -> None:
        self.alone: object = None
        self.together: set[int] = set()

    def take_alone(self, who: object) -> bool:
        if self.together or self.alone not in (None, who):
            return False
        self.alone = who
        return True

    def take_together(self, who: int) -> bool:
        if self.alone is not None:
            return False
        self.together.add(who)
        return True


class Generator:
    """One incarnation, as `rollout/generator/process.py` has it."""

    def __init__(self, index: int, incarnation: int) -> None:
        self.index = index
        self.incarnation = incarnation
        self.started = False
        self.version = NOTHING
        self.resting = False
        self.loading: Version | None = None
        self.notice: WeightNotice | str | None = None


class World:
    """Engines that start, generate, rest, load and die; a learner that takes turns, and dies as well."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = self.random.randint(1, 4)
        self.rolling = self.random.random() < 0.5
        self.lock = Lock()
        self.generators = [Generator(index, 0) for index in range(self.count)]
        self.core = core(self.count, rolling=self.rolling)
        self.published = -1
        self.wants = False
        self.steps = False
        self.now = 0.0
        self.turns = 0
        self.calm = False
        self.deaths: list[tuple[int, int]] = []  # that the supervisor has not told yet

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Notify(index, notice):
                    assert not self.wants, "told to load while the learner has the device"
                    self.deliver(index, notice)
                case Rest(index):
                    assert self.wants, "told to rest for nothing"
                    self.deliver(index, "rest")

    def deliver(self, index: int, notice: WeightNotice | str) -> None:
        if self.generators[index].started and (self.calm or self.random.random() < 0.9):
            self.generators[index].notice = notice

    def report(self, each: Generator) -> None:
        if each.started:
            checksum = 100 + each.version.n if each.version.n >= 0 else 0
            status = WeightStatus(each.index, each.incarnation, each.version, checksum=checksum)
            status = replace(status, resting=each.resting, loading=each.loading is not None)
            self.take(self.core.status(self.now, status))

    def check(self) -> None:
        on_device = [each.index for each in self.generators if each.index in self.lock.together]
        assert not (self.steps and on_device), f"the learner steps, and {on_device} are there"
        for each in self.generators:
            assert each.resting or not each.started or each.index in self.lock.together, "it runs, and has no turn"

    def generator_moves(self, each: Generator) -> None:
        if not each.started:
            each.started = self.lock.take_together(each.index)
        elif each.loading is not None:
            each.version = max(each.loading, Version(0, self.published))
            each.loading = None
            each.resting = False
            self.report(each)
        elif each.notice == "rest" and not each.resting:
            each.resting = True
            self.lock.together.discard(each.index)
            self.report(each)
        elif isinstance(each.notice, WeightNotice) and (each.resting or each.notice.version > each.version):
            each.loading = each.notice.version if self.lock.take_together(each.index) else None

    def learner_moves(self) -> None:
        if not self.wants:
            self.wants = True
            self.take(self.core.take(self.now))
        elif not self.steps:
            self.steps = self.lock.take_alone(self)
        else:
            self.published += 1
            self.take(publish(self.core, self.published, self.now))
            self.leave()
            self.turns += 1
            self.take(self.core.give(self.now))

    def leave(self) -> None:
        self.steps = False
        self.wants = False
        self.lock.alone = None

    def learner_dies(self) -> None:
        """Its successor has the newest version, and publishes it first."""
        self.leave()
        self.core = core(self.count, rolling=self.rolling)
        for index, incarnation in [(each.index, each.incarnation) for each in self.generators]:
            if incarnation:
                self.core.peer_died(self.now, index, incarnation - 1)
        self.published -= self.published >= 0

    def generator_dies(self, each: Generator) -> None:
        self.lock.together.discard(each.index)
        self.generators[each.index] = Generator(each.index, each.incarnation + 1)
        self.deaths.append((each.index, each.incarnation))

    def step(self) -> None:
        self.now += 0.5
        each = self.random.choice(self.generators)
        kinds = ["heartbeat", "generator", "learner", "tell"]
        match self.random.choice(kinds if self.calm else [*kinds * 5, "die", "learner dies"]):
            case "heartbeat":
                self.report(each)
            case "generator":
                self.generator_moves(each)
            case "learner":
                self.learner_moves()
            case "tell" if self.deaths:
                self.take(self.core.peer_died(self.now, *self.deaths.pop(0)))
            case "die":
                self.generator_dies(each)
            case "learner dies":
                self.learner_dies()
        self.check()


@pytest.mark.parametrize("seed", range(300))
def test_nobody_meets_and_nobody_waits_for_ever(seed: int) -> None:
    world = World(seed)
    for _ in range(world.random.randint(20, 300)):
        world.step()

    world.calm = True
    before = world.turns
    for _ in range(400):
        world.step()
    assert world.turns > before + 1, f"the learner has no turn: {world.core.waiting_for()}"

    while world.wants:  # the last turn ends: engines answer the closing evaluation
        world.step()
    for _ in range(400):
        world.now += 0.5
        each = world.random.choice(world.generators)
        world.random.choice([world.generator_moves, world.report])(each)
        world.check()
    assert [each.version.n for each in world.generators] == [world.published] * world.count
    assert not any(each.resting for each in world.generators), world.core.waiting_for()
