"""Context columns: what an engine has read of prompts and observations stands at its token, whatever happens between.

Every expectation is computed anew from the ids of the finished sequence.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from rl.config.schema import load_config
from rl.learner.batches import check_batch_part
from rl.models.packing import make_packs
from rl.store.batch_files import read_batch_parts
from rl.wire.columns import COLUMNS, context_columns, register
from rl.wire.messages import BatchPart, Generate, Generated, Ticket, TokenSequence, Version
from rollout.broker.actions import BatchSample, EmitBatch
from rollout.broker.assembly import make_batch_parts, outcome_of
from rollout.broker.validation import fault
from rollout.episodes.conversation import Conversation
from rollout.episodes.environment import ChatMessage, Step
from rollout.episodes.episode import EpisodeContext, run_episode
from rollout.episodes.forest import Forest
from rollout.episodes.parsing import PlainParser, TurnReader
from rollout.episodes.tokenizer import IdTokenizer
from rollout.episodes.turns import EpisodeFailed, TurnSampler
from rollout.generator.engines.base import Sampled
from rollout.proxy.continuations import Continuations
from tests.reading import READ, SAMPLER, answer, check, fill, read_entries, sampler_entries
from tests.rollout.trajectories import finish as finish_turn
from tests.rollout.trajectories import with_sequence
from tests.test_end_to_end_simulated import check_books, finish, start, wait_for_step
from tests.test_recovery import kill

TICKET = Ticket(7, 1, 0, 0, Version(0, 3))
SETTINGS = ("generator.max_model_len=64", "sampling.max_tokens=6", "env.max_turns=3")


@pytest.fixture(autouse=True)
def columns_of_context(own_table: None) -> None:
    register(READ)
    register(SAMPLER)


class Model:
    """Answers requests as `script` says, one entry each: (how many tokens, why it ended, whether context is told)."""

    def __init__(self, *script: tuple[int, str, bool]) -> None:
        self.script = list(script)
        self.asked: list[Generate] = []

    def sampled(self, request: Generate, tokens: int, reason: str, told: bool) -> Sampled:
        first = int(request.prompt_ids.sum()) % 50 + 10
        sampled = Sampled(list(range(first, first + tokens)), [-0.5] * tokens, [3] * tokens, reason, tokens)
        fill(request, sampled, len(self.asked), ended=told)
        if not told:
            sampled.columns["read"] = READ.full(tokens)
        return sampled

    async def generate(self, request: Generate, *_: Any) -> Generated:
        self.asked.append(request)
        return answer(request, self.sampled(request, *(self.script.pop(0) if self.script else (3, "stop", True))))


class ThreeTurns:
    """Observations of one, two, … ids."""

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, task: Any) -> list[ChatMessage]:
        return [ChatMessage("user", "1 2 3")]

    async def step(self, action: str, truncated: bool = False) -> Step:
        self.turns += 1
        return Step([ChatMessage("user", " ".join("4" * self.turns))], 1.0, self.turns == 3, True)

    async def close(self) -> None:
        pass


def play(model: Model, ticket: Ticket = TICKET) -> Any:
    context = EpisodeContext(load_config(None, [*SETTINGS]), IdTokenizer(), model.generate)
    return asyncio.run(run_episode(ticket, ThreeTurns, None, context))


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        ([], [(0, 3), (6, 7), (10, 12)]),  # nothing comes twice
        (
            [(0, "abort", False), (2, "abort", True), (0, "abort", True), (2, "stop", True)],
            [(0, 3), (0, 3), (5, 5), (5, 5), (7, 8), (11, 13)],
        ),
        (
            [(2, "abort", False), (1, "abort", False), (2, "stop", True), (2, "stop", True), (1, "abort", False)],
            [(0, 3), (0, 5), (0, 6), (8, 9), (11, 13), (11, 14)],
        ),
    ],
    ids=["whole", "aborted", "cut_off"],
)
def test_every_token_of_three_turns_has_the_entry_of_its_history(
    script: list[tuple[int, str, bool]], asked: list[tuple[int, int]]
) -> None:
    """asked: of each request, how many tokens of its prompt are known, and how many it has."""
    model = Model(*script)
    trajectory = play(model)
    assert len(trajectory.sequence.turns) == 3
    check(trajectory.sequence)
    assert fault(trajectory, TICKET, newest=Version(0, 3), vocabulary=1 << 31) == ""
    assert [(request.known, len(request.prompt_ids)) for request in model.asked] == asked


def test_an_answer_with_other_entries_than_those_asked_for_is_refused() -> None:
    async def changed(request: Generate, **context: Any) -> Generated:
        reply = await Model().generate(request)
        return structs.replace(reply, **context)

    def said(**context: Any) -> str:
        model = Model()
        model.generate = lambda request, *_: changed(request, **context)  # type: ignore[method-assign]
        with pytest.raises(EpisodeFailed) as failed:
            play(model)
        return str(failed.value)

    whole = read_entries([1, 2, 3])
    assert "answered of what it has read: read is uint16(2, 48), expected uint16(3, 48)" in said(
        context={"read": whole[1:]}
    )
    assert "read is int64(3, 48), expected uint16" in said(context={"read": whole.astype(np.int64)})
    assert "column 'read' is missing" in said(context={"sampler": sampler_entries([1, 2, 3], 0, 0)})
    assert "'sampler' is not registered for this place" in said(context={"read": whole, "sampler": whole})
    assert "the context columns read reach to 0: an engine brings them in Sampled.context" in said(context={})


def test_a_sampled_column_has_no_context() -> None:
    """Without context columns requests and answers are as they were."""
    del COLUMNS["read"]
    assert context_columns() == []
    model = Model()

    async def generate(request: Generate, *_: Any) -> Generated:
        model.asked.append(request)
        sampled = model.sampled(request, 2, "stop", True)
        del sampled.columns["read"]
        sampled.context = {}
        return answer(request, sampled)

    model.generate = generate  # type: ignore[method-assign]
    sequence = play(model).sequence
    assert [request.known for request in model.asked] == [0, 0, 0]
    assert (sequence.columns["sampler"][sequence.loss_mask == 0] == -1).all()


def test_histories_that_fork_keep_the_entries_of_what_they_share() -> None:
    model = Model()
    sampler = TurnSampler(TICKET, load_config(None, [*SETTINGS]), [], model.generate)
    forest = Forest(TurnReader(IdTokenizer(), PlainParser()))

    def ask(messages: list[ChatMessage], *script: tuple[int, str, bool]) -> list[ChatMessage]:
        model.script = list(script)
        turn = forest.attach(messages)
        generated, _ = asyncio.run(sampler.turn(turn.growing))
        message = finish_turn(forest, turn, generated.finish_reason)
        forest.answered(turn, message)
        return [*messages, message]

    opening = [ChatMessage("user", "1 2 3")]
    first = ask(opening, (1, "abort", False), (2, "stop", True))
    longer = ask([*first, ChatMessage("user", "5")])
    ask([*first, ChatMessage("user", "6 7")], (2, "abort", True), (2, "stop", True))
    ask([*longer, ChatMessage("user", "8")])
    ask([ChatMessage("user", "9")])

    sequences = forest.sequences()
    assert [len(sequence.turns) for sequence in sequences] == [3, 1, 1]
    assert [sequence.shared for sequence in sequences] == [0, sequences[0].turns[0].end, 0]
    for sequence in sequences:
        check(sequence)
    assert [request.known for request in model.asked] == [0, 0, 6, 6, 10, 10, 0]


def test_a_stop_text_cuts_a_turn_and_what_follows_has_its_entries() -> None:
    model = Model((6, "stop", True))
    sampler = TurnSampler(TICKET, load_config(None, [*SETTINGS]), [], model.generate)
    forest = Forest(TurnReader(IdTokenizer(), PlainParser()))
    turn = forest.attach([ChatMessage("user", "1 2 3")])
    asyncio.run(sampler.turn(turn.growing))
    message = finish_turn(forest, turn, "stop", [f"{turn.context[5]}"])
    forest.answered(turn, message)

    after = forest.attach([ChatMessage("user", "1 2 3"), message, ChatMessage("user", "4")])
    asyncio.run(sampler.turn(after.growing))
    forest.answered(after, finish_turn(forest, after, "stop"))
    (sequence,) = forest.sequences()
    assert sequence.turns[0].end == 6 and model.asked[1].known == 6
    check(sequence)


def test_what_a_dead_generator_sampled_has_the_entries_of_who_went_on() -> None:
    """Two deaths inside one response; then it is cut before anybody has answered, and asked for again."""
    model = Model()
    continuations = Continuations()
    conversation = Conversation(IdTokenizer(), [ChatMessage("user", "1 2 3")])
    request = Generate(4, 7, "train", Version(0, 3), conversation.context(), 30, 1.0, 1.0, [], known=conversation.known)

    going_on = request
    for tokens in (4, 3):
        continuations.sent(4)
        part = model.sampled(going_on, tokens, "", False).arrays()
        del part["read"]  # as a generator tells of a response that runs
        continuations.deliver(4, 0, part)
        going_on = continuations.go_on(going_on, tokens)
    assert (going_on.known, len(going_on.prompt_ids)) == (0, 10)
    last = answer(going_on, model.sampled(going_on, 2, "stop", True))
    columns, context, kept = continuations.answer(4, last.columns, last.context)
    assert kept == 7 and len(context["read"]) == 3

    conversation.append_generated(columns, context)
    check(conversation.sequence())

    part = model.sampled(request, 3, "", False).arrays()
    continuations.deliver(4, 0, part)
    continuations.go_on(request, 3)
    nothing = answer(request, Sampled(finish_reason="abort"))
    columns, context, kept = continuations.answer(4, nothing.columns, nothing.context)
    again = Conversation(IdTokenizer(), [ChatMessage("user", "1 2 3")])
    again.append_generated(columns, context)
    assert kept == 3 and again.lacks_context and again.known == 0
    rest = structs.replace(request, prompt_ids=again.context(), known=again.known)
    last = answer(rest, model.sampled(rest, 2, "stop", True))
    again.append_generated(last.columns, last.context)
    check(again.sequence())


def test_the_pack_has_them_at_their_tokens() -> None:
    """Two samples of several turns on one token axis, as the forward gets it."""
    tickets = [Ticket(i, i, 0, 0, Version(0, 3)) for i in range(2)]
    trajectories = [play(Model((0, "abort", False), (1 + i, "stop", True)), ticket) for i, ticket in enumerate(tickets)]
    samples = [BatchSample(i, 0, 0, 3, outcome_of(one)) for i, one in enumerate(trajectories)]
    (part,) = make_batch_parts(EmitBatch(3, samples, {}), timeline=0, ranks=1)
    check_batch_part(part, step=3, rank=0, timeline=0, staleness_bound=0)

    (pack,) = make_packs(part, 1000, version=3)
    assert pack.columns["read"].dtype == torch.int32
    for place in range(2):
        of_sample = pack.sample == place
        expected = read_entries(pack.token_ids[of_sample].numpy()).astype(np.int32)
        np.testing.assert_array_equal(pack.columns["read"][of_sample].numpy(), expected)


def test_the_broker_refuses_entries_that_are_too_few() -> None:
    trajectory = play(Model())
    short = with_sequence(trajectory, read=trajectory.sequence.columns["read"][1:])
    message = fault(short, TICKET, newest=Version(0, 3), vocabulary=1 << 31)
    assert message.startswith("read is uint16(")


def sequences_of(part: BatchPart) -> Iterator[TokenSequence]:
    end = 0
    for length in part.lengths:
        columns = {name: values[end : end + length] for name, values in part.columns.items()}
        yield TokenSequence(columns=columns, turns=[])
        end += length


@pytest.mark.docs
@pytest.mark.parametrize("on_update", ["recompute", "abort"])
def test_generators_and_the_proxy_die_and_every_entry_is_right(tmp_path: Path, on_update: str) -> None:
    """Real processes: three turns, an update at each step, two generators of which one dies, and the proxy.

    A generator tells of a response every 128 tokens. These are five times as long, and more than seats, so that
    whenever it dies it has told of most that it runs.
    """
    process = start(
        tmp_path,
        "algo.columns=[tests.reading:READ, tests.reading:SAMPLER]",
        "steps=10",
        "eval.tasks=0",
        "tracking.replay=full",
        "timeouts.heartbeat_s=0.1",
        "learner.options.step_s=0.1",
        "sampling.max_tokens=800",
        "generator.max_model_len=4096",
        "generator.max_num_seqs=6",
        f"generator.on_update={on_update}",
        "generator.options.decode_base_s=0.0005",
        "generator.options.length_mean=700",
        "env.max_turns=3",
        "env.options.turns=3",
        "max_restarts=9",
    )
    try:
        wait_for_step(tmp_path, 3)
        kill(tmp_path, "generator")
        wait_for_step(tmp_path, 6)
        kill(tmp_path, "proxy")
        wait_for_step(tmp_path, 8)
        kill(tmp_path, "broker")
        check_books(finish(process, tmp_path), 10)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
            process.communicate(timeout=60)

    hopped = 0
    for part in read_batch_parts(tmp_path / "simulated"):
        for sequence, starts in zip(sequences_of(part), part.turn_starts, strict=True):
            check(sequence)
            samplers = sequence.columns["sampler"][:, 1]
            for begin in starts:
                end = begin + int(np.argmin(np.append(sequence.loss_mask[begin:], 0)))
                hopped += len(set(samplers[begin:end].tolist())) > 1
    assert hopped > 0 or on_update == "abort", "no response went on at another generator"
