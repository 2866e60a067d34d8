"""Agents that own their loop: `run(task, endpoint) -> Outcome`, the second protocol beside reset and step.

The agent asks the model over HTTP, at an endpoint that belongs to its ticket alone. What it was answered is the
episode: a forest of token sequences (`rollout/episodes/forest.py`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from rl.config.schema import Config
from rl.wire.messages import LARGEST_REWARD, NO_OPINION, Ticket, TokenSequence, Trajectory
from rl.wire.text import whole
from rollout.episodes.environment import Endpoint, ForeignLoop, Outcome, RewardFailed
from rollout.episodes.forest import Forest
from rollout.episodes.isolation import Overrun, isolated
from rollout.episodes.parsing import TurnReader
from rollout.episodes.session import Session
from rollout.episodes.turns import EpisodeFailed, TurnSampler

_GRACE_S = 5.0  # for a client that has gone to ask again, before its generation ends

OpenEndpoint = Callable[[int, Session], AbstractAsyncContextManager[Endpoint]]
"""(ticket id, session): an address at which the session answers, for as long as the context is open."""


@dataclass(frozen=True)
class ForeignContext:
    """What every foreign loop of a server shares."""

    config: Config
    reader: TurnReader
    open_endpoint: OpenEndpoint


async def play(
    loop: ForeignLoop,
    task: Any,
    ticket: Ticket,
    context: ForeignContext,
    sampler: TurnSampler,
    begun: Callable[[int], None],
) -> Trajectory:
    """The trajectory of one episode. Raises EpisodeFailed for an agent that raised unanswered, or asked for nothing.

    Once the model has answered, what an agent raises may be the answer's doing: nobody can tell, so the reward has
    failed. A generation that failed is the run's own fault, whatever the agent makes of it.
    """
    chat = context.config.chat
    limit = context.config.generator.max_model_len
    forest = Forest(context.reader, thinking=chat.thinking, limit=limit, name=f"{ticket.ticket_id}_")
    session = Session(sampler, forest, grace_s=_GRACE_S, stop=chat.stop)
    begin = time.monotonic()

    try:
        async with context.open_endpoint(ticket.ticket_id, session) as endpoint:
            outcome, unrewarded = await _outcome(loop.run(task, endpoint), ticket.deadline_s, session)
    finally:
        begun(session.begun)
        await asyncio.shield(session.close())

    if not forest.turns:
        raise EpisodeFailed("environment: run asked the model for nothing, or took no answer")
    return sampler.trajectory(
        _rewarded(forest, outcome),
        begin,
        columns=forest.sample_columns(),
        success=outcome.success,
        stop_reason="length" if forest.turns[-1].finish_reason == "length" else "done",
        info={**outcome.info, **_counts(session)},
        unrewarded=unrewarded,
    )


async def _outcome(run: Coroutine[Any, Any, Outcome], deadline_s: float, session: Session) -> tuple[Outcome, str]:
    """What the episode was worth, and why that is not known, if it is not."""
    try:
        return _checked(await isolated(run, deadline_s)), ""
    except RewardFailed as error:
        return Outcome(None, False), str(error) or repr(error)

    except EpisodeFailed:
        raise
    except Overrun:
        raise EpisodeFailed(f"environment: run took longer than its ticket's {deadline_s:g} s") from None
    except Exception as error:
        why = f"environment: run raised {type(error).__name__}: {error}"
        if session.failed or not session.forest.turns:
            raise EpisodeFailed(why) from error
        return Outcome(None, False), why


def _rewarded(forest: Forest, outcome: Outcome) -> list[TokenSequence]:
    """The sequences, with the reward of the episode on the last turn beside what single responses earned."""
    by_id = {f"resp-{turn.number}": turn for turn in forest.turns}
    strange = outcome.rewards.keys() - by_id.keys()
    if strange:
        raise EpisodeFailed(f"environment: run rewarded {sorted(strange)[0]!r}, which is no response of this episode")

    for name, reward in outcome.rewards.items():
        by_id[name].reward += reward
    forest.turns[-1].reward += outcome.reward or 0.0
    return forest.sequences()


def _counts(session: Session) -> dict[str, float]:
    """What the forest made of the agent's requests, as the environment's own numbers are reported."""
    forest = session.forest
    found = {f"forks_{reason}": float(count) for reason, count in forest.forks.items()}
    for kind, count in forest.drift().items():
        found[f"drift_{kind}"] = float(count)
    if forest.mender.count:
        found["half_characters"] = float(forest.mender.count)
    return found | {
        "gateway_requests": float(session.begun),
        "gateway_joined": float(session.joined),
        "gateway_abandoned": float(session.abandoned),
    }


def _checked(outcome: Any) -> Outcome:
    if not isinstance(outcome, Outcome):
        raise EpisodeFailed(f"environment: run answered {type(outcome).__name__}, not an Outcome")
    if not isinstance(outcome.success, bool):
        raise EpisodeFailed(f"environment: run answered success={outcome.success!r}: it is True or False")
    if not isinstance(outcome.rewards, Mapping):
        raise EpisodeFailed(f"environment: run answered rewards={outcome.rewards!r}: they are numbers by response")

    rewards = {str(name): reward_of(value, "run") for name, value in outcome.rewards.items()}
    info = info_of(outcome.info, "run")
    known = {name: value for name, value in rewards.items() if value is not None}
    reward = reward_of(outcome.reward, "run")
    if reward is None and not known:
        raise RewardFailed(NO_OPINION)
    return replace(outcome, reward=reward, rewards=known, info=info)


def reward_of(value: Any, what: str) -> float | None:
    """A plain number, which a numpy scalar is not; None: no opinion. Raises RewardFailed.

    One that is too large would be refused by the broker, and tried again.
    """
    if value is None:
        return None
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardFailed(f"environment: {what} answered a reward that is no number: {error}") from None
    if not math.isfinite(reward):
        raise RewardFailed(f"environment: {what} answered the reward {reward}")
    if abs(reward) > LARGEST_REWARD:
        raise RewardFailed(f"environment: {what} answered the reward {reward:g}: at most {LARGEST_REWARD:g} in size")
    return reward


def info_of(values: Mapping[str, Any], what: str) -> dict[str, float]:
    """Plain numbers by name. Raises EpisodeFailed."""
    try:
        info = {whole(str(name)): float(value) for name, value in values.items()}
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EpisodeFailed(f"environment: {what} answered info that is no number: {error}") from None
    for name, value in info.items():
        if not math.isfinite(value):
            raise EpisodeFailed(f"environment: {what} answered the {name} {value}")
    return info
