"""Episodes played by scripted agents through the very episode loop of training, with bytes for tokens.

An agent reads the conversation as text and writes the next turn. What training would refuse (a step that raises, hangs
or answers nonsense) fails the episode here too, with the same words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rl.config.schema import Config
from rl.wire.columns import ONE_TURN, masked_columns, masked_context
from rl.wire.messages import NO_OPINION, Generate, Generated, Ticket, Trajectory, Version
from rollout.episodes.environment import ChatMessage, Environment, EnvironmentFamily, Tools
from rollout.episodes.episode import Activity, EpisodeContext, run_episode
from rollout.episodes.tokenizer import IdTokenizer
from rollout.episodes.turns import EpisodeFailed

END = 256  # of a turn; ids below are bytes
LONGEST = 1 << 24  # bytes of a conversation, and of a turn


@dataclass(frozen=True)
class Said:
    """A turn; `cut`: as if the limit of tokens had ended it."""

    text: str
    cut: bool = False


@dataclass(frozen=True)
class View:
    """What an agent may look at before it writes."""

    environment: Environment
    task_index: int
    turn: int  # from 0
    text: str  # of the conversation so far


Agent = Callable[[View], Awaitable[Said]]


@dataclass(frozen=True)
class PlayResult:
    """`error`: why the episode failed; then nothing else is known of it."""

    error: str = ""
    opening: str = ""
    text: str = ""  # the whole conversation
    rewards: tuple[float, ...] = ()
    success: bool = False
    stop_reason: str = ""
    silent: bool = False  # a step neither ended the episode nor said anything

    @property
    def reward(self) -> float:
        return sum(self.rewards)

    @property
    def what_happened(self) -> tuple[object, ...]:
        """What must be the same if the same is done again."""
        return self.error, self.text, self.rewards, self.success, self.stop_reason


class ByteTokenizer(IdTokenizer):
    """A message is its bytes; no message is lost and none is added."""

    def __init__(self) -> None:
        self.stop_ids = [END]

    def written(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> str:
        return "".join(f"{message.content}\n" for message in messages)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        written = np.asarray(ids, np.int32)
        return written[written < END].astype(np.uint8).tobytes().decode("utf-8", "replace")

    turn_text = raw = decode


class Player:
    """Plays with one family, which has started."""

    def __init__(self, family: EnvironmentFamily, config: Config) -> None:
        self.family = family
        self.activity = Activity()
        self._tokenizer = ByteTokenizer()
        self._played = 0
        limits = {
            "sampling": config.sampling.model_copy(update={"max_tokens": LONGEST}),
            "generator": config.generator.model_copy(update={"max_model_len": 4 * LONGEST}),
            "chat": config.chat.model_copy(update={"thinking": "keep"}),  # one sequence holds what was said
        }
        self.config = config.model_copy(update=limits)

    async def play(self, index: int, agent: Agent, split: str = "train") -> PlayResult:
        """Play one episode of this task. Raises what the agent raises."""
        try:
            task = self.family.task(split, index)
            environment = self.family.make()
        except Exception as error:  # the environment's own code
            return PlayResult(error=f"task {index} raised {type(error).__name__}: {error}")

        self._played += 1
        ticket = Ticket(self._played, self._played, 0, index, Version(0, 0), kind=split)
        generate = self._generator(environment, index, agent)
        context = EpisodeContext(self.config, self._tokenizer, generate, self.activity)
        try:
            return self._outcome(await run_episode(ticket, lambda: environment, task, context))
        except EpisodeFailed as error:
            return PlayResult(error=str(error).removeprefix("environment: "))

    async def play_all(self, indices: Sequence[int], agent: Agent, together: bool = False) -> list[PlayResult]:
        """Play these tasks one after another, or all of them at once."""
        if together:
            return list(await asyncio.gather(*(self.play(index, agent) for index in indices)))
        return [await self.play(index, agent) for index in indices]

    def _generator(
        self, environment: Environment, index: int, agent: Agent
    ) -> Callable[[Generate], Awaitable[Generated]]:
        turn = 0

        async def generate(request: Generate) -> Generated:
            nonlocal turn
            said = await agent(View(environment, index, turn, self._tokenizer.decode(request.prompt_ids)))
            turn += 1
            await asyncio.sleep(0)  # so that episodes that run together alternate
            ids = [*said.text.encode("utf-8", "replace"), *([] if said.cut else [END])] or [END]
            return _answer(request, ids, "length" if said.cut else "stop")

        return generate

    def _outcome(self, trajectory: Trajectory) -> PlayResult:
        (sequence,) = trajectory.sequences
        turns = sequence.turns
        decode = self._tokenizer.decode

        return PlayResult(
            opening=decode(sequence.token_ids[: turns[0].start]),
            text=decode(sequence.token_ids),
            rewards=tuple(turn.reward for turn in turns),
            success=trajectory.success,
            stop_reason=trajectory.stop_reason,
            silent=any(before.end == after.start for before, after in pairwise(turns)),
            error="" if trajectory.unrewarded in ("", NO_OPINION) else f"no reward: {trajectory.unrewarded}",
        )


def _answer(request: Generate, ids: list[int], reason: str) -> Generated:
    columns = masked_columns({"token": len(ids), **ONE_TURN}, "generator")
    written = {"token_ids": np.array(ids, np.int32), "policy_version": np.zeros(len(ids), np.int32)}
    return Generated(
        request_id=request.request_id,
        session=request.session,
        columns=columns | written,
        context=masked_context(len(request.prompt_ids) - request.known),
        timeline=0,
        finish_reason=reason,
        tokens_generated=len(ids),
        generator=0,
    )
