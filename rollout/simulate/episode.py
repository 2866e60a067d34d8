"""Environment servers and their episodes in virtual time: reset -> (generate -> step)* -> deliver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from rl.core.messages import Ticket, Version
from rollout.broker.actions import Outcome
from rollout.episodes.turn_barrier import GENERATE, STEP, TurnBarrier
from rollout.simulate.laws import normal, uniform
from rollout.simulate.setting import Setting


class Surroundings(Protocol):
    """What an environment server needs of the system around it."""

    setting: Setting
    now: float

    def at(self, when: float, handle: Callable[..., None], *arguments: Any) -> None: ...

    def post(self, handle: Callable[..., None], *arguments: Any) -> None: ...

    def generate(self, episode: Episode) -> None: ...

    def abort(self, episode: Episode) -> None: ...

    def finished(self, ticket_id: int, outcome: Outcome) -> None: ...

    def failed(self, ticket_id: int, reason: str, turns: int) -> None: ...

    def cancelled(self, ticket_id: int, turns: int) -> None: ...

    def issued(self, episode: Episode) -> None: ...

    def lengths(self, server: int, ticket: Ticket) -> list[int]: ...

    def step_seconds(self, episode: Episode) -> float: ...

    def reward(self, task: int, seed: int) -> float: ...

    def environment_begins(self) -> None: ...

    def environment_ends(self) -> None: ...


class Episode:
    """One attempt at a sample; `ended` also when it only waits for the answer to its abort."""

    __slots__ = (
        "began", "begun", "context", "ended", "environment_s", "first_version", "key", "lengths", "request_id",
        "server", "ticket", "tokens", "turn",
    )  # fmt: skip

    def __init__(self, ticket: Ticket, server: Server, lengths: list[int], began: float, context: int) -> None:
        self.ticket, self.server, self.lengths, self.began = ticket, server, lengths, began
        self.turn = self.tokens = 0
        self.begun = 0  # turns
        self.environment_s = 0.0  # in steps that answered
        self.context = context
        self.first_version = -1
        self.request_id = -1  # of the running generation; -1: in the environment
        self.key = -1
        self.ended = False

    @property
    def stream(self) -> int:
        """Of the draws of this attempt's environment (`laws.uniform`)."""
        return 2 * self.ticket.ticket_id  # twice, so that the recorded results stay what they are


class Server:
    """One incarnation of an environment server. Its ends of tickets go to the broker in order."""

    def __init__(self, world: Surroundings, index: int, incarnation: int, slowness: float) -> None:
        self.world, self.index, self.incarnation, self.slowness = world, index, incarnation, slowness
        self.client = (index, incarnation)
        self.barrier: TurnBarrier[int] | None = TurnBarrier(world.post) if world.setting.turn_barrier else None
        self.alive = True
        self.episodes: dict[int, Episode] = {}  # by ticket
        self.requests: dict[int, Episode] = {}  # by request id
        self._next_request = 0
        self._overdue: deque[tuple[float, Episode]] = deque()

    # ------------------------------------------------------------ from the broker

    def begin(self, ticket: Ticket) -> None:
        world, work = self.world, self.world.setting.work
        lengths = world.lengths(self.index, ticket)
        episode = Episode(ticket, self, lengths, world.now, work.prompt_tokens)
        self.episodes[ticket.ticket_id] = episode
        if self.barrier is not None:
            self.barrier.join(ticket.ticket_id)
        world.issued(episode)
        if not self._overdue:
            world.at(world.now + ticket.deadline_s, self._check_deadlines)
        self._overdue.append((world.now + ticket.deadline_s, episode))
        reset_s = self.slowness * work.reset_s.at(normal(episode.stream, 0))
        if reset_s:
            world.environment_begins()
            world.at(world.now + reset_s, self._reset, episode)
        else:
            self._generate(episode)

    def cancel(self, ticket_id: int) -> None:
        episode = self.episodes.get(ticket_id)
        if episode is None:
            return  # its end is on the way
        if episode.request_id >= 0:
            self.world.abort(episode)  # the answer ends the episode
            episode.ended = True
        else:
            self._end(episode)
            self.world.post(self.world.cancelled, ticket_id, episode.begun)

    # ------------------------------------------------------------ the loop of one episode

    def _reset(self, episode: Episode) -> None:
        self.world.environment_ends()
        if not episode.ended:
            self._generate(episode)

    def _generate(self, episode: Episode) -> None:
        """With a per-turn barrier: when every environment has stepped."""
        if self.barrier is not None:
            self.barrier.arrive(episode.ticket.ticket_id, GENERATE, lambda: self._request(episode))
        else:
            self._request(episode)

    def _request(self, episode: Episode) -> None:
        if episode.ended:
            return  # cancelled while it waited for the others
        episode.begun += 1
        episode.request_id = self._next_request
        self._next_request += 1
        self.requests[episode.request_id] = episode
        self.world.generate(episode)

    def answered(self, episode: Episode, tokens: int, reason: str, version: Version | None) -> None:
        """`version`: of the first token sampled."""
        del self.requests[episode.request_id]
        episode.request_id = -1
        episode.tokens += tokens
        episode.context += tokens
        if episode.ended:  # cancelled meanwhile
            self._end(episode)
            self.world.post(self.world.cancelled, episode.ticket.ticket_id, episode.begun)
        elif reason != "stop":
            self._fail(episode, reason)
        else:
            if episode.first_version < 0 and version is not None:
                episode.first_version = version.n
            self._answer(episode)

    def _answer(self, episode: Episode) -> None:
        """With a per-turn barrier the environments step when every generation has ended."""
        if self.barrier is not None:
            self.barrier.arrive(episode.ticket.ticket_id, STEP, lambda: self._step(episode))
        else:
            self._step(episode)

    def _step(self, episode: Episode) -> None:
        if episode.ended:
            return
        world, work = self.world, self.world.setting.work
        draw = 3 * episode.turn
        seconds = self.slowness * world.step_seconds(episode)
        if work.hang_probability and uniform(episode.stream, draw + 2) < work.hang_probability:
            world.environment_begins()
            world.at(world.now + work.step_deadline_s, self._hung, episode)
        elif work.fail_probability and uniform(episode.stream, draw + 3) < work.fail_probability:
            world.environment_begins()
            world.at(world.now + seconds, self._hung, episode)
        elif seconds:
            episode.environment_s += seconds
            world.environment_begins()
            world.at(world.now + seconds, self._stepped, episode)
        else:
            self._turn_done(episode)

    def _stepped(self, episode: Episode) -> None:
        self.world.environment_ends()
        if not episode.ended:
            self._turn_done(episode)

    def _hung(self, episode: Episode) -> None:
        self.world.environment_ends()
        if not episode.ended:
            self._fail(episode, "environment")

    def _turn_done(self, episode: Episode) -> None:
        """The next turn, unless it was the last one or the context is full (stop reason `context`)."""
        world, ticket = self.world, episode.ticket
        episode.turn += 1
        context = episode.context + world.setting.work.observation_tokens
        if episode.turn < len(episode.lengths) and context < world.setting.engine.max_model_len:
            episode.context = context
            self._generate(episode)
            return
        self._end(episode)
        reward = world.reward(ticket.task_index, ticket.seed)
        outcome = Outcome(
            epoch=0, first_version=episode.first_version, reward=reward, tokens_generated=episode.tokens,
            length=episode.tokens, turns=episode.turn, success=reward, seconds=world.now - episode.began,
            payload=episode.environment_s,
        )  # fmt: skip
        world.post(world.finished, ticket.ticket_id, outcome)

    def _fail(self, episode: Episode, reason: str) -> None:
        self._end(episode)
        self.world.post(self.world.failed, episode.ticket.ticket_id, reason, episode.begun)

    def _end(self, episode: Episode) -> None:
        episode.ended = True
        self.episodes.pop(episode.ticket.ticket_id, None)
        if self.barrier is not None:
            self.barrier.leave(episode.ticket.ticket_id)

    def _check_deadlines(self) -> None:
        """An episode past its deadline ends `failed`; the deadline is one number, so they stand in order."""
        world, overdue = self.world, self._overdue
        while overdue and (overdue[0][1].ended or overdue[0][0] <= world.now):
            episode = overdue.popleft()[1]
            if not episode.ended and self.alive:
                self._overrun(episode)
        if overdue and self.alive:
            world.at(overdue[0][0], self._check_deadlines)

    def _overrun(self, episode: Episode) -> None:
        if episode.request_id >= 0:
            self.world.abort(episode)
            episode.ended = True  # the broker learns it as `cancelled`, which counts as failed
        else:
            self._fail(episode, "deadline")

    def die(self) -> None:
        self.alive = False
        for episode in list(self.episodes.values()):
            self._end(episode)
        self._overdue.clear()
