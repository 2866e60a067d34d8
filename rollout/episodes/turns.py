"""Sampling turns for one ticket: what every request of it has in common, and what was sampled in total."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager as ContextManager
from contextlib import nullcontext
from typing import Any

from msgspec.structs import replace

from rl.config.schema import Config
from rl.config.seeds import turn_seed
from rl.observe.trace import NO_TRACE, Trace
from rl.observe.trace_events import Answered, Requested
from rl.wire.columns import context_columns
from rl.wire.messages import LARGEST_REWARD, Generate, Generated, Ticket, TokenSequence, Trajectory
from rollout.episodes.sequence import GrowingSequence

GenerateCall = Callable[..., Awaitable[Generated]]
"""(request, ending=None, read=None): answers one request and assigns `request_id`; see `GenerationClient.generate`."""


class EpisodeFailed(Exception):
    """This ticket has no result; the message says what went wrong, in one line."""


class _Reading:
    """The ids of one turn for who reads along, each once, whatever requests the turn takes."""

    def __init__(self, tell: Callable[[list[int]], None]) -> None:
        self._tell = tell
        self._told = 0  # ids of the turn
        self._begun = 0  # where the present request began

    def read(self, place: int, ids: list[int]) -> None:
        """Ids of the present request, from this place of its response on."""
        known = self._told - self._begun - place
        if 0 <= known < len(ids):
            self._told += len(ids) - known
            self._tell(ids[known:])

    def answered(self, ids: list[int]) -> None:
        """All of the present request; the turn may go on with another."""
        self.read(0, ids)
        self._begun = self._told


class TurnSampler:
    """The sampler of one ticket's turns. `during` wraps every wait for a generator (`Activity.during`)."""

    def __init__(
        self,
        ticket: Ticket,
        config: Config,
        stop_ids: Sequence[int],
        generate: GenerateCall,
        during: Callable[[], ContextManager[None]] = nullcontext,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.temperature = ticket.temperature
        self.max_tokens = config.sampling.max_tokens  # of one turn

        self.requests = 0
        self.turns = 0  # begun
        self.tokens_generated = 0  # as the generators reported, aborted parts included
        self.timeline = -1  # of the last generation
        self.newest_version = -1  # of all tokens so far, in whatever sequence

        self._ticket = ticket
        self._config = config
        self._stop_ids = list(stop_ids)
        self._generate = generate
        self._during = during
        self._trace = trace

    def trajectory(self, sequences: list[TokenSequence], begin: float, **told: Any) -> Trajectory:
        """Of the ticket's episode, which began then, with what else is `told` of it. The server numbers it."""
        ticket = self._ticket
        sequences, told["unrewarded"] = _bounded(sequences, told.get("unrewarded", ""))
        return Trajectory(
            server=0,
            incarnation=0,
            seq=0,
            ticket_id=ticket.ticket_id,
            sample_id=ticket.sample_id,
            group_id=ticket.group_id,
            task_index=ticket.task_index,
            kind=ticket.kind,
            timeline=self.timeline,
            sequences=sequences,
            reward=math.fsum(turn.reward for sequence in sequences for turn in sequence.turns),
            tokens_generated=self.tokens_generated,
            seconds=time.monotonic() - begin,
            **told,
        )

    async def turn(
        self,
        sequence: GrowingSequence,
        max_tokens: int | None = None,
        ending: asyncio.Future[None] | None = None,
        tell: Callable[[list[int]], None] | None = None,
        stop: Sequence[str] = (),
    ) -> tuple[Generated, bool]:
        """Generate one turn into the sequence; the last answer, and whether the context ended it.

        A turn aborted on the generators' side (at a weight update) keeps what it has and goes on from there.
        * `max_tokens` is `self.max_tokens` where there is none, and never more.
        * Once `ending` is done the turn is aborted, with what it has.
        * `tell` gets the ids while they are sampled, each once.
        * `stop` is texts that end the turn where they end, as far as the engine reads text.

        Raises EpisodeFailed.
        """
        limit = self._config.generator.max_model_len
        wanted = self.max_tokens if max_tokens is None else min(self.max_tokens, max_tokens)
        reading = _Reading(tell) if tell else None
        self.turns += 1
        turn = self.turns
        while True:
            room = limit - len(sequence)
            if room < 1:
                raise EpisodeFailed(
                    f"the prompt of {len(sequence)} tokens leaves no room in generator.max_model_len={limit}"
                )

            request = self._request(sequence, min(wanted, room), reading is not None, stop)
            generated = await self._ask(turn, request, ending, reading)
            if generated.finish_reason == "error":
                raise EpisodeFailed(f"generation failed: {generated.error}")
            try:
                start, end = sequence.append_generated(generated.columns, generated.context)
            except ValueError as error:
                raise EpisodeFailed(f"generator {generated.generator} answered {error}") from None

            self.newest_version = max(self.newest_version, sequence.newest_version)
            wanted -= end - start
            if reading:
                reading.answered(generated.token_ids.tolist())

            if generated.finish_reason != "abort":
                if end == start:
                    raise EpisodeFailed(f"generator {generated.generator} answered without a token")
                _check_context(sequence, generated)
                return generated, generated.finish_reason == "length" and wanted > 0
            if ending is not None and ending.done():
                return generated, False
            if wanted < 1 or len(sequence) >= limit:
                _check_context(sequence, generated)
                return replace(generated, finish_reason="length"), wanted > 0

    def _request(self, sequence: GrowingSequence, max_tokens: int, stream: bool, stop: Sequence[str]) -> Generate:
        ticket = self._ticket
        sampling = self._config.sampling
        seed = turn_seed(ticket.seed, self.requests) if sampling.seeded else None
        self.requests += 1

        return Generate(
            request_id=0,
            session=ticket.ticket_id,
            kind=ticket.kind,
            version=ticket.gate(self.newest_version),
            prompt_ids=sequence.context(),
            known=sequence.known,
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=1.0,  # of any other distribution importance ratios would be biased
            stop_token_ids=self._stop_ids,
            stop=list(stop),
            seed=seed,
            priority=ticket.group_id if ticket.kind == "train" else 0,
            stream=stream,
        )

    async def _ask(
        self, turn: int, request: Generate, ending: asyncio.Future[None] | None, reading: _Reading | None
    ) -> Generated:
        more = (ending, reading.read) if reading else (ending,) if ending is not None else ()
        self._trace.add(Requested(request.session, turn, len(request.prompt_ids)))
        with self._during():
            generated = await self._generate(request, *more)
        tokens = len(generated.token_ids)
        self._trace.add(Answered(request.session, turn, generated.generator, tokens, generated.finish_reason))

        self.tokens_generated += generated.tokens_generated
        self.timeline = generated.timeline
        return generated


def _check_context(sequence: GrowingSequence, last: Generated) -> None:
    """Check that at the end of a turn every token has its context columns. Raises EpisodeFailed."""
    if sequence.lacks_context:
        names = ", ".join(column.name for column in context_columns())
        raise EpisodeFailed(
            f"generator {last.generator} ended a turn of {len(sequence)} tokens, and the context columns {names} reach "
            f"to {sequence.known}: an engine brings them in Sampled.context"
        )


def _bounded(sequences: list[TokenSequence], unrewarded: str) -> tuple[list[TokenSequence], str]:
    """The sequences, and why their reward is not known. Rewards that each are small enough may not be so together:
    the broker would refuse the episode, and try it again in vain."""
    rewards = [turn.reward for each in sequences for turn in each.turns]
    largest = max((math.fsum(rewards), *rewards), key=abs)
    if abs(largest) <= LARGEST_REWARD:
        return sequences, unrewarded

    why = f"environment: the rewards of an episode add up to {largest:g}: at most {LARGEST_REWARD:g} in size"
    bare = [replace(each, turns=[replace(turn, reward=0.0) for turn in each.turns]) for each in sequences]
    return bare, unrewarded or why
