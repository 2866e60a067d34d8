"""Fuzzed sessions: is every trained token one that was sampled in that place?

The engine here writes turns that models write (thoughts, tool calls, noise), in tokens that no tokenizer would choose
for that text, ended by a stop token or cut. It keeps a record of every request. `check` compares a trajectory with
these records alone and knows nothing of the forest.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from experiments.gateway.agents import Agent
from rl.config.schema import load_config
from rl.wire.messages import Generate, Generated, Ticket, TokenSequence, Version
from rollout.episodes.environment import ChatMessage
from rollout.episodes.forest import Forest, RequestRefused
from rollout.episodes.generation import Read
from rollout.episodes.parsing import HermesParser, TurnReader
from rollout.episodes.session import Session
from rollout.episodes.thinking import Thinking
from rollout.episodes.tokenizer import ChatTokenizer, TokenizerError
from rollout.episodes.turns import TurnSampler

LIMIT = 4096
FIRST_VERSION = 3  # of the weights


class RecordingEngine:
    """Answers one session with seeded turns; `records`: by prompt ids, (ids, log-probabilities, versions)."""

    def __init__(self, tokenizer: ChatTokenizer, chance: random.Random) -> None:
        self.records: defaultdict[bytes, list[tuple[bytes, ...]]] = defaultdict(list)
        self.tokens = 0
        self._tokenizer = tokenizer
        self._chance = chance
        self._version = FIRST_VERSION

    async def generate(
        self, request: Generate, ending: asyncio.Future[None] | None = None, read: Read | None = None
    ) -> Generated:
        chance = self._chance
        for _ in range(chance.randint(1, 4)):
            await asyncio.sleep(0)
        self._version = max(request.version.n, self._version + (chance.random() < 0.05))

        ids = self._turn()[: request.max_tokens]
        place = 0
        while read and place < len(ids) - 1:
            size = chance.randint(1, len(ids) - 1 - place)
            again = chance.randint(0, place) if chance.random() < 0.1 else place  # some of it was told before
            read(again, ids[again : place + size])
            place += size
            await asyncio.sleep(0)

        aborted = ending is not None and ending.done()
        if not aborted and chance.random() < 0.1:  # a weight update that aborts what runs
            aborted = True
        if aborted:
            ids = ids[: chance.randrange(place, len(ids))]
        reason = "abort" if aborted else "stop" if ids[-1] in self._tokenizer.stop_ids else "length"
        return self._answered(request, ids, reason)

    def _answered(self, request: Generate, ids: list[int], reason: str) -> Generated:
        columns = {
            "token_ids": np.array(ids, np.int32),
            "logp_behavior": np.array([-self._chance.random() for _ in ids], np.float32),
            "policy_version": np.full(len(ids), self._version, np.int32),
        }

        generated = Generated(
            request_id=request.request_id,
            session=request.session,
            columns=columns,
            timeline=request.version.timeline,
            finish_reason=reason,
            tokens_generated=len(ids),
            generator=0,
        )

        self.tokens += len(ids)
        if ids:
            told = tuple(columns[name].tobytes() for name in ("token_ids", "logp_behavior", "policy_version"))
            self.records[request.prompt_ids.tobytes()].append(told)
        return generated

    def _turn(self) -> list[int]:
        """What a model might write, cut into tokens at random places."""
        chance = self._chance
        written = "<think>\n because \n</think>\n\n" if chance.random() < 0.3 else ""
        written += chance.choice(["", "the sum is 12", "é ∑ \n ok ", "a file; 1 2 3"])
        for _ in range(chance.choice([0, 0, 1, 2])):
            call = json.dumps({"name": "add", "arguments": {"a": chance.randint(0, 99), "b": 1}})
            written += f"<tool_call>\n{call if chance.random() < 0.9 else call[:-3]}\n</tool_call>"

        ids: list[int] = []
        while written:
            size = chance.randint(1, 9)
            if written.startswith("<"):
                size = written.find(">") + 1 or size
            ids += self._tokenizer.encode(written[:size])
            written = written[size:]
        if chance.random() < 0.85 or not ids:
            ids.append(chance.choice(self._tokenizer.stop_ids))
        return ids


@dataclass
class Report:
    """Counts over sessions."""

    sessions: int = 0
    sequences: int = 0
    turns: int = 0
    trained_tokens: int = 0
    read_tokens: int = 0
    dropped_tokens: int = 0  # sampled, and given to nobody
    refused: int = 0  # requests
    wrong: list[str] = field(default_factory=list)
    forks: Counter[str] = field(default_factory=Counter)
    drift: Counter[str] = field(default_factory=Counter)
    deeds: Counter[str] = field(default_factory=Counter)


def check(sequences: list[TokenSequence], engine: RecordingEngine) -> str:
    """What is wrong with the sequences of a trajectory, or the empty string."""
    trained: Counter[tuple[bytes, bytes]] = Counter()
    for sequence in sequences:
        mask = np.zeros(len(sequence.token_ids), np.uint8)
        for turn in sequence.turns:
            mask[turn.start : turn.end] = 1
            if wrong := _span(sequence, turn.start, turn.end, engine):
                return wrong

            span = sequence.token_ids[: turn.start].tobytes(), sequence.logp_behavior[turn.start : turn.end].tobytes()
            trained[span] += 1
            parts = engine.records[sequence.token_ids[: turn.start].tobytes()]  # siblings may be equal
            if trained[span] > sum(_equal(sequence, turn.start, turn.end, part) > 0 for part in parts):
                return "a turn is trained twice"
        if not np.array_equal(mask, sequence.loss_mask):
            return "a token outside the turns is trained"
    return ""


def _span(sequence: TokenSequence, start: int, end: int, engine: RecordingEngine) -> str:
    """A turn may be sampled in several parts, each of which went on from the one before, and be cut by a stop text."""
    while start < end:
        parts = engine.records.get(sequence.token_ids[:start].tobytes(), [])
        size = next((size for part in parts if (size := _equal(sequence, start, end, part))), 0)
        if not size:
            return f"the tokens from {start} on were not sampled after those before them"
        start += size
    return ""


def _equal(sequence: TokenSequence, start: int, end: int, part: tuple[bytes, ...]) -> int:
    """How many tokens of this part stand at `start`, up to `end`; 0 if other ones do."""
    size = 4 * min(len(part[0]) // 4, end - start)  # bytes: all three have four for a token
    columns = sequence.token_ids, sequence.logp_behavior, sequence.policy_version
    stands = [values[start : start + size // 4].tobytes() for values in columns]
    return size // 4 if stands == [each[:size] for each in part] else 0


def knows(tokenizer: ChatTokenizer) -> tuple[bool, bool]:
    """Whether the template takes system messages, and tool calls with their answers."""
    user = ChatMessage("user", "q")
    example = HermesParser().example()
    found = []
    for messages in ([ChatMessage("system", "s"), user], [user, example, ChatMessage("tool", "a", call_id="call_1")]):
        try:
            tokenizer.prompt([message for message in messages if message is not None])
            found.append(True)
        except TokenizerError:
            found.append(False)
    return found[0], found[1]


async def play(
    tokenizer: ChatTokenizer,
    seed: int,
    report: Report,
    thinking: Thinking = "keep",
) -> list[TokenSequence]:
    """One session of a fuzzed agent, counted and checked in the report; what of it would be trained."""
    chance = random.Random(seed)
    config = load_config(None, [f"generator.max_model_len={LIMIT}", "sampling.max_tokens=200"])
    engine = RecordingEngine(tokenizer, chance)
    ticket = Ticket(seed + 1, 0, 0, 0, Version(0, FIRST_VERSION), seed=seed)
    sampler = TurnSampler(ticket, config, tokenizer.stop_ids, engine.generate)
    forest = Forest(TurnReader(tokenizer, HermesParser()), thinking=thinking, limit=LIMIT)
    session = Session(sampler, forest, grace_s=0)

    with_system, with_tools = knows(tokenizer)
    agent = Agent(session, chance, with_system=with_system, with_tools=with_tools)
    try:
        await agent.play()
    except RequestRefused:
        report.refused += 1
    await session.close()

    sequences = forest.sequences()
    report.sessions += 1
    report.sequences += len(sequences)
    report.forks += forest.forks
    report.drift += forest.drift()
    report.deeds.update(agent.deeds)

    trained = sum(int(sequence.loss_mask.sum()) for sequence in sequences)
    report.turns += sum(len(sequence.turns) for sequence in sequences)
    report.trained_tokens += trained
    report.read_tokens += sum(len(sequence.token_ids) for sequence in sequences) - trained
    report.dropped_tokens += engine.tokens - trained
    if sampler.tokens_generated != engine.tokens:
        report.wrong.append(f"seed {seed}: {sampler.tokens_generated} tokens counted, {engine.tokens} sampled")
    if wrong := check(sequences, engine):
        report.wrong.append(f"seed {seed}: {wrong}")
    return sequences
