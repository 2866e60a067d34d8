"""One episode: reset → (generate → step)* → reward, as one coroutine with no barrier to any other (but for the
baseline `rollout.turn_barrier`).

Stop reasons of a trajectory: `done` (the environment said so), `length` (it said so after a turn cut at
`sampling.max_tokens`), `context` (`generator.max_model_len` is full), `max_turns`.

The environment is foreign code: each call runs in a task of its own with a deadline, and whatever it does (raise,
hang, swallow its cancellation, answer nonsense) fails this episode only, as EpisodeFailed. It is closed exactly once,
also after a failure or a cancel.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace

from rl.core.config import Config
from rl.core.messages import Generate, Generated, Ticket, Trajectory, Turn
from rl.core.seeds import turn_seed
from rollout.episodes.conversation import Conversation
from rollout.episodes.environment import ChatMessage, Environment, Step
from rollout.episodes.tokenizer import ConversationTokenizer
from rollout.episodes.turn_barrier import GENERATE, STEP, TurnBarrier

CANCEL_GRACE_S = 1.0  # for foreign code to honour its cancellation before it is abandoned
CLOSE_DEADLINE_S = 10.0

GenerateCall = Callable[[Generate], Awaitable[Generated]]
"""Answers one request and assigns `request_id`. Cancelled, it aborts the request and waits for the answer first."""

T = TypeVar("T")


class EpisodeFailed(Exception):
    """This ticket has no result; the message says what went wrong, in one line."""


@dataclass
class Activity:
    """Where the episodes of one server spend their time; shared by all of them."""

    running: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Episodes that wait for a generation (`generate`) or are inside an environment call (`environment`) now."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Episode-seconds spent so far, likewise."""
    close_failures: int = 0

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        self.running[what] += 1
        try:
            yield
        finally:
            self.running[what] -= 1
            self.seconds[what] += time.monotonic() - begin


@dataclass
class Progress:
    """How far an episode has come: what is known of one that does not end by itself."""

    turns: int = 0  # begun: with a generation requested


@dataclass(frozen=True)
class EpisodeContext:
    """What every episode of a server shares."""

    config: Config
    tokenizer: ConversationTokenizer
    generate: GenerateCall
    activity: Activity = field(default_factory=Activity)
    barrier: TurnBarrier[int] | None = None  # over tickets; waiting there counts towards the episode's deadline only


async def run_episode(
    ticket: Ticket,
    make: Callable[[], Environment],
    task: Any,
    context: EpisodeContext,
    progress: Progress | None = None,
) -> Trajectory:
    """The finished trajectory of this ticket (server, incarnation and seq left 0 for the sender).

    Raises EpisodeFailed; CancelledError when cancelled, after the running generation was aborted.
    """
    episode = _Episode(ticket, make(), context, progress or Progress())
    if context.barrier is not None:
        context.barrier.join(ticket.ticket_id)
    try:
        return await episode.run(task)
    finally:
        if context.barrier is not None:
            context.barrier.leave(ticket.ticket_id)  # before closing, for which nobody else needs to wait
        await episode.close()


@dataclass
class _Episode:
    ticket: Ticket
    environment: Environment
    context: EpisodeContext
    progress: Progress
    info: dict[str, float] = field(default_factory=dict)  # the last value of each number the environment reported
    requests: int = 0
    tokens_generated: int = 0
    epoch: int = -1  # of the last generation

    async def run(self, task: Any) -> Trajectory:
        begin = time.monotonic()
        messages = _checked_messages(await self._call(self.environment.reset(task), "reset"), "reset")
        conversation = Conversation(self.context.tokenizer, messages)

        stop_reason = ""
        while not stop_reason:
            stop_reason = await self._turn(conversation)

        return Trajectory(
            server=0,
            incarnation=0,
            seq=0,
            ticket_id=self.ticket.ticket_id,
            sample_id=self.ticket.sample_id,
            group_id=self.ticket.group_id,
            task_index=self.ticket.task_index,
            kind=self.ticket.kind,
            epoch=self.epoch,
            sequences=[conversation.sequence()],
            columns=conversation.sample_columns(),
            reward=math.fsum(turn.reward for turn in conversation.turns),
            stop_reason=stop_reason,
            tokens_generated=self.tokens_generated,
            seconds=time.monotonic() - begin,
            info=self.info,
        )

    async def _turn(self, conversation: Conversation) -> str:
        """One generate → step round; the reason to stop, or the empty string."""
        start = len(conversation)
        what = f"step of turn {len(conversation.turns) + 1}"

        await self._barrier(GENERATE)
        self.progress.turns += 1
        begin = time.monotonic()
        generated, cut_by_context = await self._generate_turn(conversation)
        generate_s = time.monotonic() - begin
        end = len(conversation)

        await self._barrier(STEP)
        begin = time.monotonic()
        step = _checked_step(await self._call(self.environment.step(conversation.text(start, end)), what), what)
        env_s = time.monotonic() - begin
        self.info.update(step.info)

        reason = generated.finish_reason
        turn = Turn(start, end, step.reward, generate_s, env_s, reason, generated.generator)
        try:
            conversation.end_turn(turn, step.columns)
        except ValueError as error:
            raise EpisodeFailed(f"environment: {what} answered {error}") from None

        if cut_by_context:
            return "context"
        if step.done:
            return "length" if reason == "length" else "done"
        if len(conversation.turns) >= self.context.config.env.max_turns:
            return "max_turns"
        room = self.context.config.generator.max_model_len - 1  # the next turn needs one id at least
        return "" if conversation.append_messages(step.messages, limit=room) else "context"

    async def _barrier(self, phase: int) -> None:
        """With a per-turn barrier: wait until the server's other episodes are there as well."""
        if self.context.barrier is not None:
            released = asyncio.Event()
            self.context.barrier.arrive(self.ticket.ticket_id, phase, released.set)
            await released.wait()

    async def _generate_turn(self, conversation: Conversation) -> tuple[Generated, bool]:
        """Generate one turn into the conversation; the last answer, and whether the context ended it.

        A turn aborted on the generators' side (at a weight update) keeps what it has and goes on from there.
        """
        wanted = self.context.config.sampling.max_tokens
        limit = self.context.config.generator.max_model_len
        while True:
            room = limit - len(conversation)
            if room < 1:
                raise EpisodeFailed(
                    f"the prompt of {len(conversation)} tokens leaves no room in generator.max_model_len={limit}"
                )

            generated = await self._generate(conversation, min(wanted, room))
            if generated.finish_reason == "error":
                raise EpisodeFailed(f"generation failed: {generated.error}")
            try:
                start, end = conversation.append_generated(generated.columns)
            except ValueError as error:
                raise EpisodeFailed(f"generator {generated.generator} answered {error}") from None

            wanted -= end - start
            if generated.finish_reason != "abort":
                if end == start:
                    raise EpisodeFailed(f"generator {generated.generator} answered without a token")
                return generated, generated.finish_reason == "length" and wanted > 0
            if wanted < 1 or len(conversation) >= limit:
                return replace(generated, finish_reason="length"), wanted > 0

    async def _generate(self, conversation: Conversation, max_tokens: int) -> Generated:
        ticket = self.ticket
        sampling = self.context.config.sampling
        request = Generate(
            request_id=0,
            session=ticket.ticket_id,
            kind=ticket.kind,
            version=ticket.version,
            prompt_ids=conversation.context(),
            max_tokens=max_tokens,
            temperature=ticket.temperature,
            top_p=sampling.top_p,
            stop_token_ids=self.context.tokenizer.stop_ids,
            seed=turn_seed(ticket.seed, self.requests) if sampling.seeded else None,
            priority=ticket.group_id if ticket.kind == "train" else 0,
        )
        self.requests += 1

        with self.context.activity.during("generate"):
            generated = await self.context.generate(request)
        self.tokens_generated += generated.tokens_generated
        self.epoch = generated.epoch
        return generated

    async def _call(self, call: Coroutine[Any, Any, T], what: str) -> T:
        """Await foreign code within the step deadline."""
        deadline_s = self.context.config.env.step_deadline_s
        try:
            with self.context.activity.during("environment"):
                return await _isolated(call, deadline_s)
        except _Overrun:
            raise EpisodeFailed(f"environment: {what} ran past env.step_deadline_s={deadline_s:g}") from None
        except Exception as error:
            raise EpisodeFailed(f"environment: {what} raised {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close the environment. A failure is counted: the episode's outcome stands without it."""
        try:
            await _isolated(self.environment.close(), CLOSE_DEADLINE_S)
        except Exception as error:
            self.context.activity.close_failures += 1
            print(f"ticket {self.ticket.ticket_id}: environment did not close: {error!r}", flush=True)


class _Overrun(Exception):
    """Foreign code ran past its deadline."""


async def _isolated(call: Coroutine[Any, Any, T], deadline_s: float) -> T:
    """Run foreign code in a task of its own: past the deadline it is cancelled, and abandoned if it resists."""

    async def guarded() -> T:
        try:
            return await call
        except (SystemExit, KeyboardInterrupt) as error:  # asyncio would let these end the whole server
            raise RuntimeError(f"{type(error).__name__}({error})") from error

    task = asyncio.ensure_future(guarded())
    try:
        await asyncio.wait({task}, timeout=deadline_s)
        if not task.done():
            raise _Overrun
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        return task.result()

    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_forget)
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)


def _forget(task: asyncio.Task[Any]) -> None:
    """Take the exception of an abandoned call, so that asyncio does not report it at collection."""
    if not task.cancelled():
        task.exception()


def _checked_messages(answer: Any, what: str) -> list[ChatMessage]:
    if not isinstance(answer, list) or not all(isinstance(message, ChatMessage) for message in answer):
        raise EpisodeFailed(f"environment: {what} answered {type(answer).__name__}, not a list of ChatMessage")
    return answer


def _checked_step(answer: Any, what: str) -> Step:
    if not isinstance(answer, Step):
        raise EpisodeFailed(f"environment: {what} answered {type(answer).__name__}, not a Step")
    try:  # plain numbers: a numpy scalar would not cross the socket
        reward = float(answer.reward)
        info = {str(name): float(value) for name, value in answer.info.items()}
    except (TypeError, ValueError) as error:
        raise EpisodeFailed(f"environment: {what} answered a reward or info that is no number: {error}") from None
    if not math.isfinite(reward):
        raise EpisodeFailed(f"environment: {what} answered the reward {reward}")
    return Step(_checked_messages(answer.messages, what), reward, bool(answer.done), info, answer.columns)
