"""The real engine under context columns: several turns, an update and an abort inside each, and an engine that dies."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rl.config.schema import load_config
from rl.wire.columns import register
from rl.wire.messages import Generate, Generated, Ticket, Version
from rollout.episodes.sequence import GrowingSequence
from rollout.episodes.turns import TurnSampler
from rollout.generator.engines.base import Sampled
from rollout.generator.jobs import Job
from rollout.proxy.continuations import Continuations
from tests.reading import READ, SAMPLER, answer, check, fill
from tests.rollout.generator.vllm_rig import PROBE, TOLERANCE, Rig

TOKENS = 150


@pytest.fixture(autouse=True)
def columns_of_context(own_table: None) -> None:
    register(READ)
    register(SAMPLER)


class Generators:
    """The rig's engine as the generator and the proxy use it. A request is aborted, or its generator dies, once it has
    `until` tokens; the next one goes on."""

    def __init__(self, rig: Rig, dies: bool) -> None:
        self.rig = rig
        self.dies = dies
        self.asked: list[tuple[int, int]] = []  # how many tokens of the prompt were known, and how many it had
        self.until = 0

    async def generate(self, request: Generate, *_: Any) -> Generated:
        self.asked.append((request.known, len(request.prompt_ids)))
        if not self.until:
            return answer(request, await self.ended(request))

        until = self.until
        self.until = 0
        job = Job(replace(request, request_id=self.rig.request([1]).request_id))
        reached = asyncio.Event()

        def progress(sampled: Sampled) -> None:
            fill(request, sampled, 1, ended=False)
            job.sampled = sampled
            if len(sampled.token_ids) >= until:
                reached.set()

        running = self.rig.begin(job.request, progress)
        await reached.wait()
        if not self.dies:
            await self.rig.engine.abort(job.request.request_id)
            sampled = await running
            await self.rig.next()  # an update inside the turn
            fill(request, sampled, 1, ended=True)
            return answer(request, sampled)

        grown = job.grown(1)
        assert grown is not None
        running.cancel()
        await asyncio.wait({running})
        await self.rig.next()
        continuations = Continuations()
        tokens = continuations.deliver(request.request_id, *grown)
        going_on = continuations.go_on(request, tokens)
        last = answer(going_on, await self.ended(going_on))
        columns, context, kept = continuations.answer(request.request_id, last.columns, last.context)
        return replace(last, columns=columns, context=context, tokens_generated=kept + last.tokens_generated)

    async def ended(self, request: Generate) -> Sampled:
        sampled = await self.rig.begin(replace(request, request_id=self.rig.request([1]).request_id))
        fill(request, sampled, 2, ended=True)
        return sampled


@pytest.mark.docs
@pytest.mark.parametrize("dies", [False, True], ids=["aborted", "killed"])
def test_every_token_of_every_turn_has_its_entry(rig: Rig, dies: bool) -> None:
    generators = Generators(rig, dies)
    config = load_config(None, ["generator.max_model_len=512", f"sampling.max_tokens={TOKENS}"])
    ticket = Ticket(5, 0, 0, 0, Version(0, rig.n))
    sampler = TurnSampler(ticket, config, [], generators.generate)
    sequence = GrowingSequence(PROBE)

    async def play() -> None:
        for turn in range(3):
            generators.until = 20
            await sampler.turn(sequence)
            sequence.append_read([7, 8, 9 + turn])

    rig.call(play())
    finished = sequence.sequence()
    assert sequence.known == len(sequence) - 3, "what was read last is brought by the next answer"
    columns = {name: values[: sequence.known] for name, values in finished.columns.items()}
    check(replace(finished, columns=columns))

    brought = [known for known, _ in generators.asked]
    assert brought == sorted(brought) and len(brought) == (3 if dies else 6)
    sampled = columns["loss_mask"] != 0
    assert sampled.sum() == 3 * TOKENS and len(set(columns["policy_version"][sampled].tolist())) == 4
    assert len(set(columns["sampler"][sampled, 1].tolist())) == 2

    # The ids are those of the engine: each has the log-probability of the weights that sampled it.
    ids = columns["token_ids"].tolist()
    for n in set(columns["policy_version"][sampled].tolist()):
        mine = columns["policy_version"] == n
        expected = np.append(0.0, rig.reference(n, ids))
        assert np.abs(expected - columns["logp_behavior"])[mine].max() < TOLERANCE
