"""Weights are proven before generation pauses for them: the engine's own load over the real channel, on two ranks.

vLLM's core is played by the workers' extension alone, in the order in which it would be called.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from rl.weights import make_sender
from rl.weights.channel import Entry, Placement, Sender
from rl.weights.host import layout
from rl.weights.host.shm import ShmSender
from rl.weights.turns import Turns
from rl.wire.messages import Version, WeightStatus
from rl.wire.run import ProcessContext
from rollout.generator.engines import vllm_worker
from rollout.generator.engines.vllm import VllmEngine
from tests.conftest import MakeRun

RANKS = 2
ENTRIES: list[Entry] = [("embed", (64, 8), "float32"), ("norm", (8,), "float32")]
FIRST = Version(0, 0)


class Worker(vllm_worker.LoadsWeights):
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model_runner: Any = type("Runner", (), {"device": "cpu"})


class Core:
    """What a load asks of vLLM's core; everything that happens, in order, is in `events`."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.died: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.workers = [Worker(rank) for rank in range(RANKS)]

    async def rpc(self, method: str, *arguments: Any) -> list[Any]:
        if method == "weights_load":
            self.events.append("load")
        return [getattr(worker, method)(*arguments) for worker in self.workers]

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        self.events.append("pause")

    async def resume(self) -> None:
        self.events.append("resume")

    async def sleep(self) -> None:
        self.events.append("sleep")

    async def wake(self, *, resume: bool) -> None:
        self.events.append("wake and resume" if resume else "wake")

    async def set_version(self, label: str) -> None:
        self.events.append(f"version {label}")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hashes of the receivers, and what comes after them."""
    found: list[str] = []
    digest = layout.digest

    def hashed(data: bytes | memoryview) -> int:
        if threading.current_thread().name == "weights":
            threading.Event().wait(0.05)  # a slow one: whatever does not wait for it comes first
            found.append("hashed")
        return digest(data)

    monkeypatch.setattr(layout, "digest", hashed)
    monkeypatch.setattr(vllm_worker, "load_all", lambda runner, pairs: [None for _ in pairs])
    return found


@pytest.fixture
def sender(make_run: MakeRun) -> Iterator[Sender]:
    run = make_run("weights.transport=shm", "weights.slots=4", f"generator.tensor_parallel={RANKS}")
    made = make_sender(run, 0, ENTRIES)
    made.open()
    yield made
    made.close()


def publish(sender: Sender, n: int) -> int | None:
    sender.offer(n, [(name, torch.full(shape, float(n)), Placement(shape)) for name, shape, _ in ENTRIES])
    receipt = sender.receipt(n)
    sender.announce(Version(0, n))
    return receipt


async def loaded(sender: Sender, events: list[str], version: Version) -> WeightStatus:
    async with opened(sender, events) as engine:
        return await asyncio.wait_for(engine.load(version, []), 60)


@asynccontextmanager
async def opened(sender: Sender, events: list[str]) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(ProcessContext(sender.run, 0, 0))
    core: Any = Core(events)
    engine._core = core
    file = sender.run.folder / "progress"
    engine._progress = np.memmap(file, np.uint64, "w+", shape=(RANKS,))
    await core.rpc("weights_open", str(sender.run.folder), 0, 0, False, str(file))
    try:
        yield engine
    finally:
        await core.rpc("weights_close")


def test_every_byte_is_proven_before_the_pause(sender: Sender, events: list[str]) -> None:
    receipt = publish(sender, 0)
    status = asyncio.run(loaded(sender, events, FIRST))
    assert status.version == FIRST and status.checksum == receipt
    hashes = len(ENTRIES) + RANKS  # each tensor by one of the ranks, which each add up their own
    assert events == ["hashed"] * hashes + ["pause", "load", "version 0.0", "resume"]
    assert status.seconds["copy"] > max(0.1, status.seconds["pause"])


def test_a_damaged_slot_is_refused_before_any_pause(sender: Sender, events: list[str]) -> None:
    publish(sender, 0)
    assert isinstance(sender, ShmSender) and sender._slots is not None
    newest = sender._slots.table.newest()
    assert newest is not None
    sender._slots.view(newest)[5] ^= 1

    with pytest.raises(RuntimeError, match=r"generator 0 could not read weights .* tensor 'embed': 2048 bytes"):
        asyncio.run(loaded(sender, events, FIRST))
    assert set(events) == {"hashed"}


def test_ranks_with_other_bytes_are_refused_before_any_pause(
    sender: Sender, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(sender, 0)
    receipts = iter([7, 8])
    monkeypatch.setattr("rl.weights.host.ends.HostReceiver.receipt", lambda self: next(receipts))
    with pytest.raises(RuntimeError, match=r"its ranks received different bytes: \['7', '8'\]"):
        asyncio.run(loaded(sender, events, FIRST))
    assert events == []


def test_ranks_that_took_other_versions_agree_before_the_pause(sender: Sender, events: list[str]) -> None:
    """A version is announced between the leases of the two ranks."""
    publish(sender, 0)
    take = vllm_worker.LoadsWeights._weights_take
    once = iter([True])

    def late(self: Any, at_least: Version) -> None:
        if self.rank == 0 and next(once, False):
            take(self, at_least)
            publish(sender, 1)
            first.set()
        elif self.rank == 1:
            first.wait(60)
            take(self, at_least)
        else:
            take(self, at_least)

    first = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_worker.LoadsWeights, "_weights_take", late)
        status = asyncio.run(loaded(sender, events, FIRST))
    assert status.version == Version(0, 1)
    assert [event for event in events if event != "hashed"] == ["pause", "load", "version 0.1", "resume"]


def test_a_load_ends_a_rest_and_has_the_device_before_it_wakes(
    make_run: MakeRun, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache comes last, and with it the requests: after the weights, and the version that they are stamped with."""
    run = make_run(
        "placement=alternate", "weights.transport=shm", "weights.slots=4", f"generator.tensor_parallel={RANKS}"
    )
    sender = make_sender(run, 0, ENTRIES)
    sender.open()
    learner = Turns(run, alone=True)

    async def main() -> None:
        publish(sender, 0)
        async with opened(sender, events) as engine:
            await engine.load(FIRST, [])
            events.clear()
            assert not learner.take()
            await engine.rest()
            assert events == ["pause", "sleep"] and learner.take()
            learner.give()

            publish(sender, 1)
            await asyncio.wait_for(engine.load(Version(0, 1), []), 60)
            woken = [event for event in events[2:] if event != "hashed"]
            assert woken == ["wake", "load", "version 0.1", "wake and resume"]
            assert not learner.take()

    asyncio.run(main())
    learner.close()
    sender.close()
