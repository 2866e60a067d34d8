"""The simulated engine: its timing model in its own time, and the engine's promises on the real clock."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from rl.wire.messages import Generate, Version
from rl.wire.run import ProcessContext
from rollout.generator.engines import simulated
from rollout.generator.engines.base import Sampled
from rollout.generator.engines.simulated import SimulatedEngine
from rollout.generator.engines.timing import BatchModel, Event, SimulatedOptions
from tests.conftest import MakeRun
from tests.rollout.generator.fake_weights import FakeReceiver


def model(seats: int = 4, **config: float) -> BatchModel:
    values = {"prefill_tokens_per_s": 1000.0, "decode_base_s": 0.01, "decode_per_seq_s": 0.002} | config
    return BatchModel(SimulatedOptions.model_validate(values), seats)


def run_out(batch: BatchModel) -> list[Event]:
    events: list[Event] = []
    while (due := batch.next_event()) is not None:
        new = batch.advance(due)
        assert new, "an event was due"
        events += new
    return events


# ---------------------------------------------------------------- the timing model


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    batch = model()
    batch.add(7, prompt_len=100, prefill=100, length=11)
    first, finished = run_out(batch)
    assert (first.kind, first.key, finished.kind, finished.key) == ("first_token", 7, "finished", 7)
    assert first.at == pytest.approx(0.1)
    assert finished.at == pytest.approx(0.1 + 10 * 0.01)
    assert len(batch) == 0


def test_a_cached_prompt_and_a_single_token_take_no_time() -> None:
    batch = model()
    batch.add(1, prompt_len=100, prefill=0, length=1)
    assert [event.at for event in run_out(batch)] == [0.0, 0.0]


def test_sequences_decode_together_and_prefills_come_first() -> None:
    """Both prefills (0.1 s each) precede decoding: 4 steps of two (0.012 s), then 5 steps of one (0.01 s)."""
    batch = model()
    batch.add(1, 100, 100, length=5)
    batch.add(2, 100, 100, length=10)
    events = run_out(batch)
    assert [event.kind for event in events] == ["first_token", "first_token", "finished", "finished"]
    assert [event.key for event in events] == [1, 2, 1, 2]
    assert [event.at for event in events] == pytest.approx([0.1, 0.2, 0.248, 0.298])


def test_seats_limit_the_batch() -> None:
    batch = model(seats=1)
    batch.add(1, 0, 0, length=11)
    batch.add(2, 0, 0, length=11)
    events = run_out(batch)
    assert [event.at for event in events] == pytest.approx([0.0, 0.1, 0.1, 0.2])


def test_a_load_stalls_and_recompute_prefills_all_context_again() -> None:
    for recompute, pause in ((False, 0.5), (True, 0.5 + 0.106)):
        batch = model()
        batch.add(1, 100, 100, length=11)
        batch.advance(0.15)
        assert batch.tokens(1) == 6
        batch.stall(0.5, recompute=recompute)
        (finished,) = run_out(batch)
        assert finished.at == pytest.approx(0.2 + pause)


def test_removing_sequences_in_every_state_leaves_the_others_alone() -> None:
    batch = model(seats=2)
    for key in (1, 2, 3, 4):
        batch.add(key, 100, 100, length=11)
    batch.advance(0.15)  # 1 decodes, 2 prefills, 3 and 4 wait
    for key in (2, 4, 1, 99):
        batch.remove(key)
    first, finished = run_out(batch)
    assert first == Event("first_token", 3, pytest.approx(0.25))  # type: ignore[arg-type]
    assert finished.at == pytest.approx(0.35)


def test_steps_of_the_clock_do_not_change_the_events() -> None:
    """Advancing from event to event, or by arbitrary ticks, yields the same history."""
    pick = random.Random(3)
    arrivals = [(pick.uniform(0, 2), key, pick.randrange(50), 1 + pick.randrange(60)) for key in range(60)]

    def history(ticks: list[float]) -> list[tuple[str, int, float]]:
        batch = model()
        events = []
        moments = sorted([(at, arrival) for at, *arrival in arrivals] + [(tick, []) for tick in ticks])
        for at, arrival in moments:
            events += batch.advance(at)
            if arrival:
                key, prompt, length = arrival
                batch.add(key, prompt, prompt, length)
        events += run_out(batch)
        return [(event.kind, event.key, round(event.at, 6)) for event in events]

    expected = history([])
    assert len(expected) == 2 * len(arrivals)
    assert history([0.005 * i for i in range(2000)]) == expected


def test_response_lengths_have_the_configured_mean() -> None:
    timing = SimulatedOptions(length_mean=200, length_sigma=1.0)
    lengths = [timing.response_length(seed) for seed in range(20_000)]
    assert np.mean(lengths) == pytest.approx(200, rel=0.05)
    assert np.median(lengths) == pytest.approx(200 * math.exp(-0.5), rel=0.05)
    assert SimulatedOptions(length_mean=24, length_sigma=0).response_length(1) == 24


# ---------------------------------------------------------------- the engine

STOP = 2


def request(request_id: int, session: int = 1, max_tokens: int = 1000, seed: int | None = None) -> Generate:
    prompt = np.arange(50, dtype="<i4")
    return Generate(request_id, session, "train", Version(0, 0), prompt, max_tokens, 1.0, 1.0, [STOP], seed)


Scenario = Callable[[SimulatedEngine, FakeReceiver], Awaitable[None]]


def play(make_run: MakeRun, scenario: Scenario, *overrides: str) -> None:
    """A started engine with version 0 loaded."""
    settings = ("decode_base_s=0.001", "decode_per_seq_s=0", "length_sigma=0", "length_mean=60")
    run = make_run("generator.engine=simulated", *(f"generator.options.{each}" for each in settings), *overrides)

    async def main() -> None:
        reader = FakeReceiver()
        engine = SimulatedEngine(ProcessContext(run, 0, 0), reader)
        try:
            info = await engine.start()
            assert (info.max_num_seqs, info.max_model_len) == (64, 2048)
            report = await engine.load(Version(0, 0), [1, 2, 3])
            assert (report.version, report.checksum) == (Version(0, 0), reader.digest)
            assert report.probe_logp == [-math.log(128)] * 2
            await scenario(engine, reader)
        finally:
            await engine.stop()

        assert reader.closed
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def ignore(_: Sampled) -> None: ...


def test_what_is_sampled_depends_on_the_seed_alone(make_run: MakeRun) -> None:
    async def scenario(engine: SimulatedEngine, _: FakeReceiver) -> None:
        alone = await engine.generate(request(1), ignore)
        crowd = await asyncio.gather(*(engine.generate(request(i, session=i - 8), ignore) for i in range(2, 30)))
        assert crowd[7].token_ids == alone.token_ids  # session 1 again
        assert len({tuple(each.token_ids) for each in crowd}) == len(crowd)
        seeded = [await engine.generate(request(40 + i, session=i, seed=5), ignore) for i in range(2)]
        assert seeded[0].token_ids == seeded[1].token_ids

        assert alone.finish_reason == "stop" and alone.token_ids[-1] == STOP
        assert STOP not in alone.token_ids[:-1] and set(alone.token_ids) <= set(range(1, 128))
        assert alone.logp == [-math.log(128)] * 60 and alone.policy_version == [0] * 60
        assert alone.tokens_generated == 60

        cut = await engine.generate(request(50, max_tokens=10), ignore)
        assert (cut.finish_reason, len(cut.token_ids)) == ("length", 10)

    play(make_run, scenario)


def test_it_takes_the_time_of_its_model_and_few_steps_of_its_own(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """38 400 tokens in 600 decode steps: it moves with the arrivals, and then in ticks of 5 ms and more."""
    moved = []
    advance = BatchModel.advance

    def counted(batch: BatchModel, now: float) -> list[Event]:
        moved.append(now)
        return advance(batch, now)

    async def scenario(engine: SimulatedEngine, _: FakeReceiver) -> None:
        begin = time.monotonic()
        await asyncio.gather(*(engine.generate(request(i, session=i), ignore) for i in range(64)))
        assert time.monotonic() - begin >= 0.599
        assert len(moved) < 64 + 0.6 / 0.005 + 10

    monkeypatch.setattr(BatchModel, "advance", counted)
    play(make_run, scenario, "generator.options.length_mean=600")


def test_progress_grows_and_an_abort_returns_it(make_run: MakeRun) -> None:
    async def scenario(engine: SimulatedEngine, _: FakeReceiver) -> None:
        counts: list[int] = []
        task = asyncio.create_task(engine.generate(request(1), lambda sampled: counts.append(len(sampled.token_ids))))
        while not counts or counts[-1] < 20:
            await asyncio.sleep(0.005)

        await engine.abort(1)
        sampled = await task
        assert sampled.finish_reason == "abort" and 20 <= len(sampled.token_ids) < 600
        assert sampled.tokens_generated == len(sampled.token_ids) == len(sampled.policy_version) == counts[-1]
        assert counts == sorted(counts)
        await engine.abort(1)  # late: nothing happens

    slow = ("generator.options.decode_base_s=0.02", "generator.options.length_mean=600")
    play(make_run, scenario, *slow)


async def update_midway(engine: SimulatedEngine, reader: FakeReceiver) -> Sampled:
    """One request of 100 tokens or more at 50 ms each; version 1 arrives after about 20 tokens."""
    started = asyncio.Event()
    task = asyncio.create_task(
        engine.generate(request(1), lambda sampled: started.set() if len(sampled.token_ids) > 20 else None)
    )
    await started.wait()
    reader.publish(Version(0, 1))
    report = await engine.load(Version(0, 1), [])
    assert report.version == Version(0, 1) and report.checksum == reader.digest
    return await task


@pytest.mark.parametrize("on_update", ["recompute", "keep", "abort", "drain"])
def test_versions_per_token_over_an_update(make_run: MakeRun, on_update: str) -> None:
    async def scenario(engine: SimulatedEngine, reader: FakeReceiver) -> None:
        sampled = await update_midway(engine, reader)
        assert len(sampled.token_ids) == len(sampled.logp) == 100
        versions = sampled.policy_version
        if on_update == "abort":
            assert versions == [1] * 100 and sampled.tokens_generated > 120
        elif on_update == "drain":
            assert versions == [0] * 100 and sampled.tokens_generated == 100
        else:
            assert versions == sorted(versions) and 20 < versions.count(0) < 90 and sampled.tokens_generated == 100
        after = await engine.generate(request(2, session=2), ignore)
        assert after.policy_version == [1] * 100

    slow = ("generator.options.decode_base_s=0.05", "generator.options.length_mean=100")
    play(make_run, scenario, f"generator.on_update={on_update}", "generator.options.load_s=0.02", *slow)


def test_a_drain_that_takes_too_long_does_not_block_the_roll(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "DRAIN_S", 0.05)

    async def scenario(engine: SimulatedEngine, reader: FakeReceiver) -> None:
        sampled = await update_midway(engine, reader)
        assert set(sampled.policy_version) == {0, 1}

    slow = ("generator.options.decode_base_s=0.02", "generator.options.length_mean=200")
    play(make_run, scenario, "generator.on_update=drain", *slow)


def test_torn_weights_are_read_again_and_the_newest_are_loaded(make_run: MakeRun) -> None:
    async def scenario(engine: SimulatedEngine, reader: FakeReceiver) -> None:
        reader.torn = 2
        reader.publish(Version(0, 4))
        leases = reader.taken
        report = await engine.load(Version(0, 3), [])
        assert report.version == Version(0, 4) and reader.taken == leases + 3

    play(make_run, scenario)


def test_the_real_reader_s_checksum_is_reported(make_run: MakeRun) -> None:
    """Through shared memory, as the learner publishes it."""
    from rl.weights import make_sender
    from rl.weights.channel import Placement

    run = make_run("generator.engine=simulated")
    sender = make_sender(run, 0, [("weight", (64,), "float32")])

    async def main() -> None:
        engine = SimulatedEngine(ProcessContext(run, 0, 0))
        try:
            await engine.start()
            sender.offer(0, [("weight", np.arange(64, dtype=np.float32), Placement((64,)))])
            receipt = sender.receipt(0)
            sender.announce(Version(0, 0))
            report = await engine.load(Version(0, 0), [])
            assert report.checksum == receipt is not None
        finally:
            await engine.stop()

    sender.open()
    try:
        asyncio.run(main())
    finally:
        sender.close()
