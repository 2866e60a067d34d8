"""The learner's wait for its turn: it ends by a name and a deadline, but not while somebody is at work on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from rl.learner.run_client import RunClient
from rl.weights.turns import Turns
from rl.wire.awake import Awake
from rl.wire.process import Process, WaitExpired
from rl.wire.run import ProcessContext, RunFile
from tests.conftest import MakeRun


class Service:
    """Who is late, as the updater would say, and what it was told."""

    def __init__(self) -> None:
        self.late: list[int] = []
        self.told: list[str] = []

    def take(self) -> None:
        self.told.append("take")

    def give(self) -> None:
        self.told.append("give")


@pytest.fixture
def run(make_run: MakeRun) -> RunFile:
    limits = ("weights.deadline_s=0.1", "timeouts.hang_s=0.3", "timeouts.heartbeat_s=0.05")
    return make_run("placement=alternate", *limits)


@pytest.fixture
def engine(run: RunFile) -> Iterator[Turns]:
    made = Turns(run, alone=False)
    assert made.take()
    yield made
    made.close()


@pytest.fixture
def client(run: RunFile, engine: Turns, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunClient]:
    made: RunClient = object.__new__(RunClient)
    made.run = run
    made.config = run.config
    made.rank = 0
    made.process = Process("learner", ProcessContext(run, 0, 0))
    made._step = 0
    made._awake = Awake(time.monotonic(), 1.0)
    made._turns = Turns(run, alone=True)
    made._service = Service()  # type: ignore[assignment]
    monkeypatch.setattr(RunClient, "listen", lambda _: None)
    yield made
    made._turns.close()


def test_one_that_does_not_rest_is_named(client: RunClient) -> None:
    service = client._service
    assert isinstance(service, Service)
    service.late = [3]
    expected = r"learner\.0 waited 0\.4 s for generator 3 to rest \(weights\.deadline_s and timeouts\.hang_s\)"
    with pytest.raises(WaitExpired, match=expected):
        client.take_devices()
    assert service.told == ["take"]


def test_one_that_starts_or_loads_has_its_time(client: RunClient, engine: Turns) -> None:
    rests = threading.Timer(1.0, engine.give)
    rests.start()
    begin = time.monotonic()
    client.take_devices()
    assert time.monotonic() - begin > 0.9 and client.process.busy
    assert client.process.waits.seconds["generators"] > 0.9
    client.take_devices()  # it has them
    assert not engine.take()

    client.give_devices()
    client.give_devices()
    assert engine.take()
    assert isinstance(client._service, Service) and client._service.told == ["take", "give"]
