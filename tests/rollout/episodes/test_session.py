"""Requests of one ticket: parallel ones, retries, clients that go away, and the end of the ticket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from experiments.gateway.agents import TOOLS
from rl.config.schema import load_config
from rl.wire.messages import Generate, Generated, Ticket, Version
from rollout.episodes.environment import ChatMessage
from rollout.episodes.forest import Forest
from rollout.episodes.generation import Read
from rollout.episodes.parsing import DistantParser, ParsedTurn, PlainParser, SampledText, TurnParser, TurnReader
from rollout.episodes.session import ModelRequest, Session, SessionClosed
from rollout.episodes.tokenizer import IdTokenizer
from rollout.episodes.turns import EpisodeFailed, TurnSampler
from tests.envs.harness import generated

ASK = ModelRequest((ChatMessage("user", "1 2 3"),))
RETRY = ModelRequest(ASK.messages, is_retry=True)


class Engine:
    """Answers when told to; an abort is answered with one token."""

    def __init__(self) -> None:
        self.asked: list[Generate] = []
        self.reads: list[Read | None] = []
        self.go = asyncio.Event()
        self.aborted = 0
        self.error = ""
        self.newer: dict[int, int] = {}  # by the request's number, how much newer than its gate the sampler is

    async def generate(self, request: Generate, ending: asyncio.Future[None], read: Read | None = None) -> Generated:
        self.asked.append(request)
        self.reads.append(read)
        number = len(self.asked)
        while not self.go.is_set() and not ending.done():
            await asyncio.sleep(0)
        if self.error:
            return generated(request, [], "error", error=self.error)
        if not self.go.is_set():
            self.aborted += 1
            return generated(request, [50 + number], "abort")
        answer = generated(request, [70 + number, 9])
        answer.columns["policy_version"] += np.int32(self.newer.get(number, 0))
        return answer


class Elsewhere(DistantParser):
    """Answers when it has been asked for three turns."""

    def __init__(self) -> None:
        self.asked: list[SampledText] = []

    async def parsed(self, turn: SampledText) -> ParsedTurn:
        self.asked.append(turn)
        while len(self.asked) < 3:
            await asyncio.sleep(0)
        return ParsedTurn(turn.text, calls=(("add", "{}"),))


def run(
    scene: Callable[[Session, Engine], Coroutine[Any, Any, None]],
    grace_s: float = 0.0,
    parser: TurnParser | DistantParser | None = None,
) -> Session:
    async def play() -> Session:
        engine = Engine()
        config = load_config(None, ["generator.max_model_len=64", "sampling.max_tokens=8"])
        sampler = TurnSampler(Ticket(5, 0, 0, 0, Version(0, 3)), config, [9], engine.generate)
        session = Session(sampler, Forest(TurnReader(IdTokenizer(), parser or PlainParser())), grace_s=grace_s)
        await asyncio.wait_for(scene(session, engine), 20)
        await session.close()
        return session

    return asyncio.run(play())


async def begun(engine: Engine, count: int) -> None:
    while len(engine.asked) < count:
        await asyncio.sleep(0)


def test_parallel_requests_are_samples_of_their_own() -> None:
    async def scene(session: Session, engine: Engine) -> None:
        both = [asyncio.create_task(session.respond(ASK)) for _ in range(2)]
        await begun(engine, 2)
        engine.go.set()
        answers = [(await task)[0] for task in both]
        assert [answer.message.content for answer in answers] == ["71 9", "72 9"]
        assert answers[0].response_id != answers[1].response_id

    sequences = run(scene).forest.sequences()
    assert [each.token_ids.tolist() for each in sequences] == [[1, 2, 3, 71, 9], [1, 2, 3, 72, 9]]


def test_a_branch_goes_on_at_the_newest_version_that_sampled_it() -> None:
    """Two branches of one episode run on generators of different versions; so does what follows the newer one."""

    async def scene(session: Session, engine: Engine) -> None:
        engine.newer = {2: 3}
        both = [asyncio.create_task(session.respond(ASK)) for _ in range(2)]
        await begun(engine, 2)
        engine.go.set()
        answers = [(await task)[0] for task in both]
        said = ChatMessage("assistant", answers[1].message.content)
        await session.respond(ModelRequest((*ASK.messages, said, ChatMessage("user", "4 5"))))
        assert [request.version for request in engine.asked] == [Version(0, 3), Version(0, 3), Version(0, 6)]

    sequences = run(scene).forest.sequences()
    assert [each.policy_version[each.loss_mask == 1].tolist() for each in sequences] == [[3, 3], [6, 6, 6, 6]]


def test_answers_of_one_request_are_read_elsewhere_side_by_side() -> None:
    parser = Elsewhere()

    async def scene(session: Session, engine: Engine) -> None:
        engine.go.set()
        answers = await session.respond(ModelRequest(ASK.messages, tools=TOOLS, answers=3))
        assert [answer.finish_reason for answer in answers] == ["tool_calls"] * 3
        assert len({answer.message.calls[0].id for answer in answers}) == 3

    run(scene, parser=parser)
    assert [turn.text for turn in parser.asked] == ["71 9", "72 9", "73 9"] and parser.asked[0].tools == TOOLS


def test_the_end_of_the_ticket_waits_for_no_parser_and_takes_no_turn_of_it() -> None:
    parser = Elsewhere()

    async def scene(session: Session, engine: Engine) -> None:
        engine.go.set()
        task = asyncio.create_task(session.respond(ASK))
        while not parser.asked:
            await asyncio.sleep(0)
        await asyncio.wait_for(session.close(), 1)
        with pytest.raises(SessionClosed):
            await task

    assert not run(scene, parser=parser).forest.turns


def test_a_marked_retry_joins_what_runs_and_what_has_ended() -> None:
    async def scene(session: Session, engine: Engine) -> None:
        first = asyncio.create_task(session.respond(ASK))
        await begun(engine, 1)
        again = asyncio.create_task(session.respond(RETRY))
        await asyncio.sleep(0)
        engine.go.set()
        assert await first == await again == await session.respond(RETRY)
        assert len(engine.asked) == 1 and session.joined == 2

    (sequence,) = run(scene).forest.sequences()
    assert sequence.loss_mask.sum() == 2  # trained once


def test_a_generation_that_nobody_waits_for_ends_and_its_tokens_are_counted() -> None:
    async def scene(session: Session, engine: Engine) -> None:
        gone = asyncio.create_task(session.respond(ASK))
        await begun(engine, 1)
        gone.cancel()
        while not engine.aborted:
            await asyncio.sleep(0)
        engine.go.set()
        await session.respond(RETRY)  # too late to join: another sample

    session = run(scene)
    assert session.abandoned == 1 and session.joined == 0 and session.sampler.tokens_generated == 3
    assert [sequence.token_ids.tolist() for sequence in session.forest.sequences()] == [[1, 2, 3, 72, 9]]


def test_a_retry_within_the_grace_saves_the_generation() -> None:
    async def scene(session: Session, engine: Engine) -> None:
        gone = asyncio.create_task(session.respond(ASK))
        await begun(engine, 1)
        gone.cancel()
        await asyncio.sleep(0)
        again = asyncio.create_task(session.respond(RETRY))
        await asyncio.sleep(0)
        engine.go.set()
        assert (await again)[0].message.content == "71 9"

    session = run(scene, grace_s=1000.0)
    assert session.abandoned == 0 and session.joined == 1


def test_the_end_of_the_ticket_ends_what_runs_and_refuses_what_comes() -> None:
    async def scene(session: Session, engine: Engine) -> None:
        running = asyncio.create_task(session.respond(ASK))
        await begun(engine, 1)
        await session.close()
        with pytest.raises(SessionClosed):
            await running
        with pytest.raises(SessionClosed):
            await session.respond(ASK)
        assert engine.aborted == 1

    session = run(scene, grace_s=1000.0)
    assert session.sampler.tokens_generated == 1 and not session.forest.sequences()


def test_a_generator_that_refuses_fails_the_request_and_not_its_retry() -> None:
    async def scene(session: Session, engine: Engine) -> None:
        engine.error = "too long"
        engine.go.set()
        with pytest.raises(EpisodeFailed, match="too long"):
            await session.respond(ASK)

        engine.error = ""  # such as that of generators that died
        (answer,) = await session.respond(RETRY)
        assert answer.message.content == "72 9" and session.joined == 0

    assert len(run(scene).forest.turns) == 1


def test_siblings() -> None:
    async def scene(session: Session, engine: Engine) -> None:
        engine.go.set()
        answers = await session.respond(ModelRequest(ASK.messages, answers=3, max_tokens=4))
        assert [answer.message.content for answer in answers] == ["71 9", "72 9", "73 9"]
        assert [request.max_tokens for request in engine.asked] == [4, 4, 4]

    assert len(run(scene).forest.sequences()) == 3
