"""`placement=alternate`: an engine that rests makes no step and keeps its requests; the process waits for its turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rl.weights.turns import Turns
from rl.wire.messages import GeneratorHello, RestNotice, Stop, Version, WeightNotice, WeightStatus
from rl.wire.run import ProcessContext
from rl.wire.sockets import send, send_to
from rollout.generator.engines.base import Sampled
from rollout.generator.engines.simulated import SimulatedEngine
from rollout.generator.engines.vllm_process import OwnProcess
from tests.conftest import MakeRun
from tests.rollout.generator.fake_weights import FakeReceiver
from tests.rollout.generator.test_generator import ME, SETTINGS, Outside
from tests.rollout.generator.test_simulated_engine import play, request

REST_S = 0.4


@pytest.fixture
def outside(make_run: MakeRun) -> Iterator[Callable[..., Outside]]:
    worlds: list[Outside] = []

    def make(*overrides: str) -> Outside:
        worlds.append(Outside(make_run(*SETTINGS, "placement=alternate", *overrides)))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def hello(world: Outside, seconds: float = 80) -> None:
    world.get(world.backend, lambda each: isinstance(each, GeneratorHello), seconds)


def rests(world: Outside, resting: bool = True) -> WeightStatus:
    told = world.get(world.status, lambda each: isinstance(each, WeightStatus) and each.resting == resting)
    assert isinstance(told, WeightStatus)
    return told


def taken(turns: Turns, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not turns.take():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_it_starts_no_engine_in_the_learners_turn_and_leaves_it_for_a_notice(outside: Callable[..., Outside]) -> None:
    world = outside("generator.options.length_mean=400", "timeouts.hang_s=0.5")
    learner = Turns(world.run, alone=True)
    assert learner.take()
    with pytest.raises(AssertionError, match="nothing wanted"):
        hello(world, 4)
    learner.give()
    hello(world)
    world.load(0)
    world.generate(1, gate=0)
    world.running(lambda running: running.get(1, 0) > 40)
    assert not learner.take()
    started = world.heartbeat(lambda each: each.waits.get("learner", 0) > 0).waits["learner"]

    send(world.notices, RestNotice())
    assert rests(world).version == Version(0, 0)
    assert taken(learner)
    world.generate(2, gate=0)
    told = [world.running(lambda running: 2 in running).running for _ in range(4)]  # all of them were told at rest
    assert 40 < told[0][1] < 400 and told == [{1: told[0][1], 2: 0}] * 4
    beat = world.heartbeat(lambda each: each.waits["learner"] > started)
    assert not beat.busy, "a rest would be taken for a hang"

    # The version that it has wakes it, but not before the learner has left.
    send(world.notices, WeightNotice(Version(0, 0), [1, 2, 3]))
    time.sleep(REST_S)
    assert rests(world).version == Version(0, 0)
    learner.give()
    rests(world, resting=False)
    answers = sorted((world.answer() for _ in range(2)), key=lambda each: each.request_id)
    assert [each.token_ids.size for each in answers] == [400, 400]
    assert not learner.take()

    send(world.notices, RestNotice())
    rests(world)
    send_to(world.control, ME, Stop("finished"))
    assert world.process.wait(60) == 0
    assert taken(learner)
    learner.close()


def test_a_later_notice_to_rest_takes_the_place_of_one_to_load(outside: Callable[..., Outside]) -> None:
    world = outside()
    learner = Turns(world.run, alone=True)
    hello(world)
    world.load(0)
    send(world.notices, RestNotice())
    rests(world)
    assert taken(learner)
    world.publish(1)
    send(world.notices, WeightNotice(Version(0, 1), []))
    time.sleep(0.1)
    send(world.notices, RestNotice())
    time.sleep(0.1)
    learner.give()
    time.sleep(REST_S)
    assert rests(world).version == Version(0, 0)
    assert learner.take()
    learner.close()


def test_without_turns_nobody_is_told_to_rest(make_run: MakeRun) -> None:
    world = Outside(make_run(*SETTINGS))
    try:
        hello(world)
        send(world.notices, RestNotice())
        assert world.heartbeat(lambda each: each.stats["malformed"] == 1)
    finally:
        world.close()


# ---------------------------------------------------------------- engines


@pytest.mark.parametrize("on_update", ["recompute", "keep", "abort", "drain"])
def test_a_simulated_engine_goes_on_as_it_updates(make_run: MakeRun, on_update: str) -> None:
    async def scenario(engine: SimulatedEngine, reader: FakeReceiver) -> None:
        counts: list[int] = []

        def count(sampled: Sampled) -> None:
            counts.append(sampled.tokens_generated)

        early = asyncio.create_task(engine.generate(request(1), count))
        while not counts or counts[-1] < 20:
            await asyncio.sleep(0.005)
        await engine.rest()
        late = asyncio.create_task(engine.generate(request(2, session=2), count))
        gone = asyncio.create_task(engine.generate(request(3, session=3), count))
        before = len(counts)
        await asyncio.sleep(REST_S)
        assert len(counts) == before and not late.done() and early.done() == (on_update == "drain")
        await engine.abort(3)
        assert (await gone).tokens_generated == 0

        reader.publish(Version(0, 1))
        await engine.load(Version(0, 1), [])
        assert (await late).policy_version == [1] * 100
        versions = (await early).policy_version
        assert versions == sorted(versions) and len(versions) == 100
        assert set(versions) == {"abort": {1}, "drain": {0}}.get(on_update, {0, 1})

    slow = ("generator.options.decode_base_s=0.01", "generator.options.length_mean=100")
    play(make_run, scenario, f"generator.on_update={on_update}", *slow)


class Told:
    """What vLLM's own engine is told, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(("sleep", level, mode))

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", tags))


@pytest.mark.parametrize(("adapter", "level"), [(None, 2), (object(), 1)])
def test_on_a_gpu_it_sleeps_and_wakes_in_two_parts(adapter: Any, level: int) -> None:
    async def main() -> None:
        core = OwnProcess(type("Arguments", (), {"enable_sleep_mode": True})(), adapter)
        told: Any = Told()
        core._llm = told
        await core.sleep()
        await core.wake(resume=False)
        await core.wake(resume=True)
        assert told.calls == [("sleep", level, "keep"), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("device", "placement", "sleeps"),
    [("cuda", "alternate", True), ("cuda", "shared", False), ("cpu", "alternate", False)],
)
def test_vllm_is_told_to_be_able_to_sleep(
    device: str, placement: str, sleeps: bool, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    from rollout.generator.engines.vllm_settings import engine_arguments

    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_: type("Told", (), {"tie_word_embeddings": False}))
    run = make_run(f"placement={placement}", "model.path=x", device=device)
    arguments, _ = engine_arguments(ProcessContext(run, 0, 0))
    assert arguments.enable_sleep_mode == sleeps
