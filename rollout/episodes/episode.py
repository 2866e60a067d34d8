"""One episode: reset → (generate → step)* → reward, as one coroutine with no barrier to any other (but for the
waits that a hook asks for).

Stop reasons of a trajectory: `done` (the environment said so), `length` (it said so after a turn cut at
`sampling.max_tokens`), `context` (`generator.max_model_len` is full), `max_turns`. Before the last two an environment
that judges on demand is asked to (`FinishedOnDemand`).

The environment is foreign code, so each call runs in a task of its own with a deadline. Whatever it does (raise, hang,
swallow its cancellation, answer nonsense) fails this episode only, as EpisodeFailed. It is closed exactly once, also
after a failure or a cancel.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from rl.config.schema import Config
from rl.observe.trace import NO_TRACE, Trace
from rl.observe.trace_events import ResetBegan, ResetEnded, StepBegan, StepEnded
from rl.wire.columns import ONE_TURN, masked_columns
from rl.wire.messages import NO_OPINION, Ticket, Trajectory, Turn
from rl.wire.text import Mender, whole
from rollout.episodes.bridge import BridgeRefused
from rollout.episodes.conversation import Conversation, ToolConversation
from rollout.episodes.environment import (
    ChatMessage,
    Environment,
    EpisodeTerms,
    FinishedOnDemand,
    ForeignLoop,
    OnOwnTerms,
    Opening,
    RewardFailed,
    Step,
)
from rollout.episodes.foreign import ForeignContext, info_of, play, reward_of
from rollout.episodes.hooks import GENERATE, STEP, EpisodeHooks
from rollout.episodes.isolation import Overrun, isolated
from rollout.episodes.parsing import TurnReader, mended
from rollout.episodes.tokenizer import AgentTokenizer
from rollout.episodes.turns import EpisodeFailed, GenerateCall, TurnSampler

CLOSE_DEADLINE_S = 10.0
MOST_NOTE = 1000  # characters of a note for people

T = TypeVar("T")


@dataclass
class Activity:
    """Where the episodes of one server spend their time; shared by all of them."""

    running: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Episodes that wait for a generation (`generate`) or are inside an environment call (`environment`) now."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Episode-seconds spent so far, likewise."""
    close_failures: int = 0
    textless_tokens: int = 0

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
    answer: str = ""  # the last turn that the environment was given
    notes: dict[str, str] = field(default_factory=dict)  # of the environment, for people


@dataclass(frozen=True)
class EpisodeContext:
    """What every episode of a server shares."""

    config: Config
    tokenizer: AgentTokenizer
    generate: GenerateCall
    activity: Activity = field(default_factory=Activity)
    trace: Trace = NO_TRACE
    hooks: EpisodeHooks = field(default_factory=EpisodeHooks)  # waiting there counts towards the deadline only
    reader: TurnReader | None = None  # where the family has tools
    foreign: ForeignContext | None = None  # where the family's agents own their loop


async def run_episode(
    ticket: Ticket,
    make: Callable[[], Environment | ForeignLoop],
    task: Any,
    context: EpisodeContext,
    progress: Progress | None = None,
) -> Trajectory:
    """The finished trajectory of this ticket (server, incarnation and seq left 0 for the sender).

    Raises EpisodeFailed; CancelledError when cancelled, after the running generation was aborted.
    """
    environment = make()
    progress = progress or Progress()
    if isinstance(environment, ForeignLoop):
        return _with_textless(await _run_foreign(ticket, environment, task, context, progress), context)

    episode = _Episode(ticket, environment, context, progress)
    context.hooks.join(ticket.ticket_id)
    try:
        return _with_textless(await episode.run(task), context)
    finally:
        context.hooks.leave(ticket.ticket_id)  # before closing, for which nobody else needs to wait
        await close(environment, ticket, context)


def _with_textless(played: Trajectory, context: EpisodeContext) -> Trajectory:
    """With the number of sampled ids that stand for no text, if there are any; a few of them are named in the log."""
    sampled = np.concatenate([each.token_ids[each.loss_mask != 0] for each in played.sequences])
    textless = context.tokenizer.textless(sampled)
    if not len(textless):
        return played

    if not context.activity.textless_tokens:
        named = ", ".join(map(str, dict.fromkeys(textless[:8].tolist())))
        print(f"sampled ids that stand for no text: {named}, …; the tokenizer has none of them", flush=True)
    context.activity.textless_tokens += len(textless)
    return replace(played, info=played.info | {"textless_tokens": float(len(textless))})


async def _run_foreign(
    ticket: Ticket, loop: ForeignLoop, task: Any, context: EpisodeContext, progress: Progress
) -> Trajectory:
    if context.foreign is None:
        raise EpisodeFailed("environment: it has run(task, endpoint), and its family does not say foreign = True")

    def begun(requests: int) -> None:
        progress.turns = requests

    try:
        played = await play(loop, task, ticket, context.foreign, _sampler(ticket, context), begun)
        return replace(played, label=getattr(loop, "terms", EpisodeTerms()).label)
    finally:
        await close(loop, ticket, context)


def _sampler(ticket: Ticket, context: EpisodeContext) -> TurnSampler:
    during = partial(context.activity.during, "generate")
    stop_ids = context.tokenizer.stop_ids
    return TurnSampler(ticket, context.config, stop_ids, context.generate, during, context.trace)


async def close(environment: Environment | ForeignLoop, ticket: Ticket, context: EpisodeContext) -> None:
    """Close what the episode holds. A failure is counted: the episode's outcome stands without it."""
    try:
        await isolated(environment.close(), CLOSE_DEADLINE_S)
    except Exception as error:
        context.activity.close_failures += 1
        print(f"ticket {ticket.ticket_id}: environment did not close: {error!r}", flush=True)


@dataclass
class _Episode:
    ticket: Ticket
    environment: Environment
    context: EpisodeContext
    progress: Progress
    info: dict[str, float] = field(default_factory=dict)  # the last value of each number the environment reported
    success: bool = False  # as the last step said
    unrewarded: str = NO_OPINION  # why its reward is not known, as things stand
    terms: EpisodeTerms = field(default_factory=EpisodeTerms)

    def __post_init__(self) -> None:
        self.sampler = _sampler(self.ticket, self.context)
        self.mender = Mender()  # of what environment and model wrote
        self.conversations: list[Conversation] = []  # several where the template drops thoughts

    async def run(self, task: Any) -> Trajectory:
        begin = time.monotonic()
        trace = self.context.trace
        trace.add(ResetBegan(self.ticket.ticket_id))
        opening = _checked_opening(await self._call(self.environment.reset(task), "reset"))
        trace.add(ResetEnded(self.ticket.ticket_id))
        if isinstance(self.environment, OnOwnTerms):
            self._take(self.environment.terms)
        self.conversations.append(self._conversation(opening))

        stop_reason = ""
        while not stop_reason:
            stop_reason = await self._turn(self.conversations[-1])

        return self.sampler.trajectory(
            [conversation.sequence() for conversation in self.conversations],
            begin,
            columns=self.conversations[-1].sample_columns(),
            success=self.success,
            stop_reason=stop_reason,
            info=self.info | self._counts(),
            label=self.terms.label,
            unrewarded=self.unrewarded,
        )

    def _conversation(self, opening: Opening | list[ChatMessage]) -> Conversation:
        thinking = self.context.config.chat.thinking
        if not isinstance(opening, Opening):
            return Conversation(self.context.tokenizer, self._whole(opening), thinking)
        if self.context.reader is None:
            raise EpisodeFailed("environment: reset answered an Opening, and its family does not say tools = True")
        whole = Opening(self._whole(opening.messages), self.mender.value(list(opening.tools)))
        return ToolConversation(self.context.reader, whole, thinking, self.mender)

    def _whole(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        return [mended(message, self.mender) for message in messages]

    def _counts(self) -> dict[str, float]:
        """What became of the conversation, as the environment's own numbers are reported; what is 0 is left out."""
        drifts = Counter(each.drift() for each in self.conversations if len(each.turns) > 1)
        found = {f"drift_{kind}": count for kind, count in drifts.items() if kind != "none"}
        found |= {"forks_thinking": len(self.conversations) - 1, "half_characters": self.mender.count}
        return {name: float(count) for name, count in found.items() if count}

    def _take(self, terms: EpisodeTerms) -> None:
        self.terms = terms
        sampler = self.sampler
        sampler.max_tokens = min(sampler.max_tokens, terms.max_tokens or sampler.max_tokens)
        if self.ticket.kind == "eval" and terms.eval_temperature is not None:
            sampler.temperature = terms.eval_temperature

    async def _turn(self, conversation: Conversation) -> str:
        """One generate → step round; the reason to stop, or the empty string."""
        start = len(conversation)
        await self._wait_for_hooks(GENERATE)
        self.progress.turns += 1
        what = f"step of turn {self.progress.turns}"
        begin = time.monotonic()
        generated, cut_by_context = await self.sampler.turn(conversation)
        generate_s = time.monotonic() - begin
        end = len(conversation)

        text = await self._text(conversation, start, end)
        await self._wait_for_hooks(STEP)
        begin = time.monotonic()
        self.context.trace.add(StepBegan(self.ticket.ticket_id, self.progress.turns))
        reason = generated.finish_reason
        self.progress.answer = text
        call = self.environment.step(text, truncated=reason == "length")

        try:
            step = _checked_step(await self._call(call, what), what)
            stop_reason = self._stop_reason(conversation, step, reason, cut_by_context)
            if stop_reason and not step.done:
                step = await self._finished(step)
        except RewardFailed as error:
            step = Step([], None, True, self.success, columns=masked_columns(ONE_TURN, "environment"))
            stop_reason = self._stop_reason(conversation, step, reason, cut_by_context)
            self.unrewarded = str(error) or repr(error)

        env_s = time.monotonic() - begin

        reward = step.reward or 0.0
        self.context.trace.add(StepEnded(self.ticket.ticket_id, self.progress.turns, reward))

        self.info.update(step.info)
        self.progress.notes.update(step.notes)
        self.success = step.success
        if step.reward is not None:
            self.unrewarded = ""

        number = self.progress.turns - 1  # over all conversations
        turn = Turn(start, end, reward, generate_s, env_s, reason, generated.generator, number)
        try:
            conversation.end_turn(turn, step.columns)
        except ValueError as error:
            raise EpisodeFailed(f"environment: {what} answered {error}") from None
        return stop_reason

    async def _text(self, conversation: Conversation, start: int, end: int) -> str:
        if not isinstance(conversation, ToolConversation):
            return conversation.text(start, end)
        sampled = conversation.sampled(start, end)
        return conversation.read(sampled, await conversation.reader.parsed(sampled))

    def _stop_reason(self, conversation: Conversation, step: Step, reason: str, cut_by_context: bool) -> str:
        """Why the episode ends with this step; the empty string: it goes on, with the step's messages appended."""
        if cut_by_context:
            return "context"
        if step.done:
            return "length" if reason == "length" else "done"

        if self.progress.turns >= min(self.terms.max_turns or math.inf, self.context.config.env.max_turns):
            return "max_turns"
        room = self.context.config.generator.max_model_len - 1  # the next turn needs one id at least
        try:
            following = conversation.followed(self._whole(step.messages), limit=room)
        except BridgeRefused as error:
            raise EpisodeFailed(f"environment: what follows the turn cannot be written: {error}") from None
        if following is None:
            return "context"
        if following is not conversation:
            self.conversations.append(following)
        return ""

    async def _finished(self, step: Step) -> Step:
        """The last step of an episode that is cut, with what an environment that judges on demand says of the work."""
        if not isinstance(self.environment, FinishedOnDemand):
            return step

        end = _checked_step(await self._call(self.environment.finish(), "finish"), "finish")
        info = {**step.info, **end.info}
        columns = {**step.columns, **end.columns}
        notes = {**step.notes, **end.notes}
        known = [each.reward for each in (step, end) if each.reward is not None]
        return Step([], math.fsum(known) if known else None, True, end.success, info, columns, notes)

    async def _wait_for_hooks(self, phase: int) -> None:
        """Wait until every hook lets it go on: with a per-turn barrier, when the server's other episodes are there
        too."""
        if self.context.hooks:
            released = asyncio.Event()
            self.context.hooks.arrive(self.ticket.ticket_id, phase, released.set)
            await released.wait()

    async def _call(self, call: Coroutine[Any, Any, T], what: str) -> T:
        """Await foreign code within the step deadline."""
        deadline_s = self.context.config.env.step_deadline_s
        try:
            with self.context.activity.during("environment"):
                return await isolated(call, deadline_s)
        except RewardFailed:
            raise
        except Overrun:
            raise EpisodeFailed(f"environment: {what} ran past env.step_deadline_s={deadline_s:g}") from None
        except Exception as error:
            raise EpisodeFailed(f"environment: {what} raised {type(error).__name__}: {error}") from error


def _checked_opening(answer: Any) -> Opening | list[ChatMessage]:
    if isinstance(answer, Opening):
        return Opening(_checked_messages(answer.messages, "reset"), answer.tools)
    return _checked_messages(answer, "reset")


def _checked_messages(answer: Any, what: str) -> list[ChatMessage]:
    if not isinstance(answer, list) or not all(isinstance(message, ChatMessage) for message in answer):
        raise EpisodeFailed(f"environment: {what} answered {type(answer).__name__}, not a list of ChatMessage")
    return answer


def _checked_step(answer: Any, what: str) -> Step:
    if not isinstance(answer, Step):
        raise EpisodeFailed(f"environment: {what} answered {type(answer).__name__}, not a Step")
    if not isinstance(answer.success, bool | np.bool_):  # a share of tests passed is no success
        raise EpisodeFailed(f"environment: {what} answered success={answer.success!r}: Step.success is True or False")

    messages = _checked_messages(answer.messages, what)
    info = info_of(answer.info, what)
    reward = reward_of(answer.reward, what)
    try:
        notes = {str(name): whole(str(text))[:MOST_NOTE] for name, text in answer.notes.items()}
    except AttributeError:
        raise EpisodeFailed(f"environment: {what} answered notes={answer.notes!r}: they are texts by name") from None
    return Step(messages, reward, bool(answer.done), bool(answer.success), info, answer.columns, notes)
