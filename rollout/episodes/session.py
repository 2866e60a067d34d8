"""What the requests of one ticket do, whatever API they came in by: generations on a forest.

* Every request is a generation of its own, also beside others that run; `n` answers are `n` turns side by side.
* A request that is marked as a retry joins the generation of its equal, running or done: the same answer, trained once.
  One that failed is begun again. An equal request without a mark is another sample.
* When everybody who waits for a generation has gone, it ends after `grace_s`, unless a retry comes. Its tokens are
  counted (`TurnSampler.tokens_generated`), and nothing of it is trained.
* A turn that was delivered to nobody is no part of the episode.
* Who asks for a stream reads along: the text of each turn as far as it is certain (`rollout/episodes/live.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollout.episodes.environment import ChatMessage, Tools
from rollout.episodes.forest import Forest, ForestTurn
from rollout.episodes.live import LiveTurn
from rollout.episodes.parsing import DistantParser, ParsedTurn, SampledText
from rollout.episodes.turns import EpisodeFailed, TurnSampler

MOST_ANSWERS = 64  # of one request
_GIVEN_UP = "nobody waited for this generation any more, or its ticket has ended"


class SessionClosed(Exception):
    """The ticket has ended, or the generation was given up."""


@dataclass(frozen=True)
class ModelRequest:
    """One request for the model, in no API's form. `stop`: texts that end an answer."""

    messages: tuple[ChatMessage, ...]
    tools: Tools = ()
    answers: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    is_retry: bool = False

    def key(self) -> str:
        """Equal for requests that ask for the same."""
        return repr((self.messages, list(self.tools), self.answers, self.max_tokens, self.stop))


@dataclass(frozen=True)
class ModelAnswer:
    """`finish_reason`: stop | length | tool_calls. `response_id` is what rewards of single responses name."""

    response_id: str
    message: ChatMessage
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class LiveAnswer:
    """An answer that is being sampled: what of it is certain so far."""

    response_id: str
    prompt_tokens: int
    turn: LiveTurn


Follow = Callable[[list[LiveAnswer]], None]
"""Called whenever there is more to tell of one of a request's answers."""


@dataclass(eq=False)
class _Generation:
    ending: asyncio.Future[None]  # done: it is to end with what it has
    task: asyncio.Task[list[tuple[ForestTurn, ChatMessage]]] = field(init=False)
    waiting: int = 0
    delivered: bool = False
    live: list[LiveAnswer] = field(default_factory=list)  # of each answer, where the request asked for a stream
    following: list[Follow] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None

    @property
    def answers(self) -> bool:
        """Whether a retry can be given its answer: it runs, or has not failed."""
        done = self.task.done()
        return not self.ending.done() and not (done and (self.task.cancelled() or self.task.exception()))


class Session:
    """The session of one ticket, on one event loop."""

    def __init__(self, sampler: TurnSampler, forest: Forest, *, grace_s: float, stop: Sequence[str] = ()) -> None:
        self.sampler = sampler
        self.forest = forest
        self.begun = 0  # generations
        self.joined = 0  # retries that were given another one's answer
        self.abandoned = 0  # generations that ended because nobody waited
        self.failed = False  # a generation has, which is not the agent's doing
        self._grace_s = grace_s
        self._stop = tuple(stop)
        self._generations: dict[str, _Generation] = {}  # the last one of each request
        self._running: set[_Generation] = set()
        self._closed = False

    async def respond(self, request: ModelRequest, follow: Follow | None = None) -> list[ModelAnswer]:
        """Raises RequestRefused for what makes no sense, EpisodeFailed, and SessionClosed.

        follow: reads along, if the request, or the one that it joins, asked for a stream.
        """
        if self._closed:
            raise SessionClosed("the ticket of this session has ended")
        generation = self._generations.get(request.key()) if request.is_retry else None
        if generation is None or not generation.answers:
            generation = self._begin(request)
        else:
            self.joined += 1

        if generation.timer is not None:
            generation.timer.cancel()
        generation.waiting += 1
        generation.following += [follow] if follow else []
        try:
            turns = await asyncio.shield(generation.task)
        finally:
            generation.waiting -= 1
            if follow:
                generation.following.remove(follow)
            if not generation.waiting and not generation.task.done():
                self._abandon(generation)

        if not generation.delivered:
            generation.delivered = True
            for turn, message in turns:
                self.forest.answered(turn, message)
        return [_answer(turn, message) for turn, message in turns]

    async def close(self) -> None:
        """No request is answered any more; returns when every generation has ended."""
        self._closed = True
        for generation in self._running:
            if not generation.ending.done():
                generation.ending.set_result(None)
        if self._running:
            await asyncio.wait([generation.task for generation in self._running])

    # ------------------------------------------------------------ inside

    def _begin(self, request: ModelRequest) -> _Generation:
        turns = [self.forest.attach(request.messages, request.tools) for _ in range(request.answers)]
        generation = _Generation(asyncio.get_running_loop().create_future())
        if request.stream:
            stop = self._stop + request.stop
            generation.live = [
                LiveAnswer(_response_id(turn), turn.prompt_length, self.forest.live(turn, stop)) for turn in turns
            ]
        generation.task = asyncio.create_task(self._generate(request, turns, generation))
        generation.task.add_done_callback(lambda _: self._ended(generation))

        self.begun += 1
        self._generations[request.key()] = generation
        self._running.add(generation)
        return generation

    async def _generate(
        self, request: ModelRequest, turns: list[ForestTurn], generation: _Generation
    ) -> list[tuple[ForestTurn, ChatMessage]]:
        stop = self._stop + request.stop
        live: list[LiveTurn | None] = [each.turn for each in generation.live]
        live = live or [None] * len(turns)
        sampled = (
            self._sample(turn, request.max_tokens, stop, generation, reader)
            for turn, reader in zip(turns, live, strict=True)
        )

        if len(turns) == 1:
            await next(sampled)
        else:
            for failed in await asyncio.gather(*sampled, return_exceptions=True):
                if failed is not None:
                    raise failed

        if generation.ending.done():
            raise SessionClosed(_GIVEN_UP)

        forest = self.forest
        ended = [
            forest.end(turn, turn.finish_reason, stop, reader.text() if reader else None)
            for turn, reader in zip(turns, live, strict=True)
        ]
        parsed = await self._parsed(ended, generation.ending)
        return [(turn, forest.read(turn, each)) for turn, each in zip(turns, parsed, strict=True)]

    async def _parsed(self, ended: list[SampledText], ending: asyncio.Future[None]) -> list[ParsedTurn]:
        """Raises SessionClosed where a parser of another process has not answered when the generation is to end."""
        reader = self.forest.reader
        if not isinstance(reader.parser, DistantParser):
            return [await reader.parsed(each) for each in ended]

        async def read() -> list[ParsedTurn]:
            return await asyncio.gather(*map(reader.parsed, ended))

        reading = asyncio.create_task(read())
        waited: set[asyncio.Future[Any]] = {reading, ending}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            reading.cancel()
            raise SessionClosed(_GIVEN_UP)
        return reading.result()

    async def _sample(
        self,
        turn: ForestTurn,
        max_tokens: int | None,
        stop: Sequence[str],
        generation: _Generation,
        live: LiveTurn | None,
    ) -> None:
        begin = time.monotonic()
        tell = partial(self._tell, generation, live) if live else None
        generated, _ = await self.sampler.turn(turn.growing, max_tokens, generation.ending, tell, stop)
        turn.generate_s = time.monotonic() - begin
        turn.finish_reason = generated.finish_reason
        turn.generator = generated.generator

    def _tell(self, generation: _Generation, live: LiveTurn, ids: list[int]) -> None:
        if live.grew(ids):
            for follow in generation.following:
                follow(generation.live)

    def _abandon(self, generation: _Generation) -> None:
        def end() -> None:
            if not generation.waiting and not generation.ending.done() and not generation.task.done():
                self.abandoned += 1
                generation.ending.set_result(None)

        generation.timer = asyncio.get_running_loop().call_later(self._grace_s, end)

    def _ended(self, generation: _Generation) -> None:
        self._running.discard(generation)
        if generation.timer is not None:
            generation.timer.cancel()
        if not generation.task.cancelled():  # of an error that nobody asks for, asyncio would speak at its collection
            self.failed |= isinstance(generation.task.exception(), EpisodeFailed)


def _response_id(turn: ForestTurn) -> str:
    return f"resp-{turn.number}"


def _answer(turn: ForestTurn, message: ChatMessage) -> ModelAnswer:
    reason = "length" if turn.finish_reason == "length" else "tool_calls" if message.calls else "stop"
    return ModelAnswer(
        response_id=_response_id(turn),
        message=message,
        finish_reason=reason,
        prompt_tokens=turn.prompt_length,
        completion_tokens=len(turn.sampled["token_ids"]),
    )
