"""The updater's thread over real sockets, with generators played by the test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from experiments.bench._inbox import receive
from rl.weights.channel import WeightsError
from rl.weights.service import UpdaterService
from rl.wire.messages import AlarmRaised, Fatal, Message, PeerDied, RestNotice, Version, WeightNotice, WeightStatus
from rl.wire.process import Process
from rl.wire.run import ProcessContext, RunFile
from rl.wire.sockets import identity, open_socket, send
from tests.conftest import MakeRun

NOTHING = Version(-1, -1)


class Played:
    """One generator's sockets."""

    def __init__(self, run: RunFile, index: int, incarnation: int = 0) -> None:
        self.index = index
        self.incarnation = incarnation
        self.notices = open_socket(zmq.ROUTER, run, "notices", index, bind=True)
        name = identity("generator", index, incarnation)
        self.status = open_socket(zmq.DEALER, run, "weight_status", identity=name)
        self.beat(NOTHING)

    def beat(self, version: Version, **more: object) -> None:
        send(self.status, WeightStatus(self.index, self.incarnation, version, **more))  # type: ignore[arg-type]

    def told(self, within_s: float = 5.0) -> int | None:
        if not self.notices.poll(int(within_s * 1000)):
            return None
        notice = receive(self.notices)
        assert isinstance(notice, WeightNotice)
        return notice.version.n

    def close(self) -> None:
        self.notices.close(linger=0)
        self.status.close(linger=0)


class Stage:
    def __init__(self, run: RunFile) -> None:
        self.run = run
        self.process = Process("learner", ProcessContext(run, 0, 0))
        self.service = UpdaterService(run, self.process, version_bytes=4032)
        self.service.start()
        self.generators: list[Played] = []

    def generator(self, index: int, incarnation: int = 0) -> Played:
        self.generators.append(Played(self.run, index, incarnation))
        return self.generators[-1]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.service.stats()
            time.sleep(0.005)

    def told_supervisor(self) -> list[Message]:
        """The alarm, and what it ends."""
        return [self.process._outbox.get(timeout=60) for _ in range(2)]


@pytest.fixture
def stage(make_run: MakeRun) -> Iterator[Callable[..., Stage]]:
    stages: list[Stage] = []

    def make(*overrides: str) -> Stage:
        stages.append(Stage(make_run(*overrides)))
        return stages[-1]

    yield make
    for made in stages:
        made.service.stop()
        made.service.stop()  # idempotent
        for generator in made.generators:
            generator.close()


def test_rolling_update_of_two_generators(stage: Callable[..., Stage]) -> None:
    scene = stage("generator.count=2")
    first = scene.generator(0)
    second = scene.generator(1)
    scene.service.publish(Version(0, 0), 7, [], [])
    assert (first.told(), second.told()) == (0, 0)
    for generator in (first, second):
        generator.beat(Version(0, 0), checksum=7, seconds={"pause": 0.25, "copy": 0.5})
    scene.until(lambda: scene.service.stats()["count"] == 2)

    stats = scene.service.stats()
    assert (stats["count"], stats["bytes"]) == (2, 2 * 4032)
    assert (stats["pause_mean_s"], stats["copy_mean_s"]) == (0.25, 0.5)

    scene.service.publish(Version(0, 1), 8, [], [])
    assert first.told() == 1 and second.told(0.2) is None
    first.beat(Version(0, 1), checksum=8)
    assert second.told() == 1
    scene.service.raise_if_failed()


def test_a_death_frees_the_roll_and_other_roles_do_not(stage: Callable[..., Stage]) -> None:
    scene = stage("generator.count=2")
    first = scene.generator(0)
    second = scene.generator(1)
    scene.service.publish(Version(0, 0), 7, [], [])
    for generator in (first, second):
        assert generator.told() == 0
        generator.beat(Version(0, 0), checksum=7)
    scene.until(lambda: scene.service.stats()["count"] == 2)

    scene.service.publish(Version(0, 1), 8, [], [])
    assert first.told() == 1
    scene.service.peer_died(PeerDied("env_server", 0, 0))
    assert second.told(0.2) is None
    scene.service.peer_died(PeerDied("generator", 0, 0))
    assert second.told() == 1
    # The connection to the dead one is still there, as when its end has not been noticed yet.
    reborn = scene.generator(0, incarnation=1)
    assert reborn.told() == 1 and first.told(0.0) is None


def test_who_rests_for_the_learner_is_told_and_woken(stage: Callable[..., Stage]) -> None:
    scene = stage()
    generator = scene.generator(0)
    scene.service.publish(Version(0, 0), 7, [], [])
    assert generator.told() == 0
    generator.beat(Version(0, 0), checksum=7)
    scene.until(lambda: scene.service.stats()["count"] == 1)

    scene.service.take()
    assert generator.notices.poll(5000) and receive(generator.notices) == RestNotice()
    scene.until(lambda: scene.service.late == [0])
    generator.beat(Version(0, 0), checksum=7, resting=True)
    scene.until(lambda: scene.service.late == [])
    scene.service.publish(Version(0, 1), 8, [], [])
    assert generator.told(0.2) is None
    scene.service.give()
    assert generator.told() == 1


def test_a_mismatch_reaches_the_main_thread_and_the_supervisor(stage: Callable[..., Stage]) -> None:
    scene = stage()
    generator = scene.generator(0)
    scene.service.publish(Version(0, 0), 7, [], [])
    assert generator.told() == 0
    generator.beat(Version(0, 0), checksum=6)
    scene.until(lambda: scene.service.failed is not None)
    with pytest.raises(WeightsError, match=r"generator 0, weights 0\.0: checksum"):
        scene.service.raise_if_failed()
    alarm, fatal = scene.told_supervisor()
    assert isinstance(alarm, AlarmRaised) and alarm.name == "weights-differ"
    assert isinstance(fatal, Fatal) and fatal.message == scene.service.failed
    assert scene.process._outbox.empty()


def test_garbage_on_the_socket_is_ignored(stage: Callable[..., Stage]) -> None:
    scene = stage()
    generator = scene.generator(0)
    generator.status.send(b"not a message")
    send(generator.status, WeightStatus(99, 0, NOTHING))
    scene.service.publish(Version(0, 0), 7, [], [])
    assert generator.told() == 0
    scene.service.raise_if_failed()


def test_an_error_of_the_thread_is_not_silent(stage: Callable[..., Stage]) -> None:
    scene = stage()
    scene.service.publish(Version(0, 3), 7, [], [])
    scene.service.publish(Version(0, 3), 7, [], [])
    scene.until(lambda: scene.service.failed is not None)
    with pytest.raises(WeightsError, match=r"updater ended: ValueError: version 0\.3 published after 0\.3"):
        scene.service.raise_if_failed()
