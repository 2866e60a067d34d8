"""Environment servers and their episodes in virtual time: reset -> (generate -> step)* -> deliver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rl.config.hooks import make_hooks
from rl.wire.messages import Ticket
from rollout.broker.actions import EpisodeOutcome
from rollout.episodes.hooks import GENERATE, STEP, EpisodeHooks
from rollout.simulate.clock import Clock
from rollout.simulate.distributions import normal, uniform
from rollout.simulate.generator import SimulatedRequest
from rollout.simulate.scenario import Scenario


@dataclass(slots=True, eq=False)
class SimulatedEpisode:
    """One attempt at a sample."""

    ticket: Ticket
    server: SimulatedServer
    lengths: list[int]
    """Tokens of each turn."""
    began: float
    """When it began, in seconds."""
    context: int
    """Tokens so far, of prompt, responses and observations."""
    turn: int = 0
    """Turns that are over."""
    begun: int = 0
    """Turns whose generation was asked for."""
    tokens: int = 0
    """The tokens that were sampled so far."""
    environment_s: float = 0.0
    """The seconds in steps that answered."""
    oldest_version: int = -1
    newest_version: int = -1
    """The newest version of the tokens so far; -1 if there are none."""
    request_id: int = -1
    """The request of the running generation; -1 while in the environment."""
    key: int = -1
    """The proxy's, of that request."""
    ended: bool = False
    """Whether it has ended, also when it only waits for the answer to its abort."""

    @property
    def stream(self) -> int:
        """The stream of the draws of this attempt's environment (`distributions.uniform`)."""
        return 2 * self.ticket.ticket_id  # twice, so that the recorded results stay what they are


class ServerEvents(Protocol):
    """Who answers what a server asks, and hears what it would tell proxy and broker."""

    def generate(self, episode: SimulatedEpisode) -> None: ...

    def abort(self, episode: SimulatedEpisode) -> None: ...

    def finished(self, ticket_id: int, outcome: EpisodeOutcome) -> None: ...

    def failed(self, ticket_id: int, reason: str, turns: int) -> None: ...

    def cancelled(self, ticket_id: int, turns: int) -> None: ...

    def issued(self, episode: SimulatedEpisode) -> None: ...

    def lengths(self, server: int, ticket: Ticket) -> list[int]: ...

    def step_seconds(self, episode: SimulatedEpisode) -> float: ...


class SimulatedServer:
    """One incarnation of an environment server. Its ends of tickets go to the broker in order."""

    def __init__(
        self, clock: Clock, listener: ServerEvents, scenario: Scenario, index: int, incarnation: int, slowness: float
    ) -> None:
        self.index = index
        self.client = (index, incarnation)
        self.alive = True
        self.episodes: dict[int, SimulatedEpisode] = {}
        """The episodes by ticket."""
        self.requests: dict[int, SimulatedEpisode] = {}
        """The episodes that wait for a generation, by request id."""

        self._clock = clock
        self._listener = listener
        self._work = scenario.work
        self._max_model_len = scenario.generators.max_model_len
        self._slowness = slowness
        self._hooks = EpisodeHooks(make_hooks("env_server", scenario.broker.hooks, clock.post, clock.post))
        self._next_request = 0
        self._deadlines: deque[tuple[float, SimulatedEpisode]] = deque()

    def begin(self, ticket: Ticket) -> None:
        """A ticket from the broker: an episode starts with its reset."""
        clock = self._clock
        lengths = self._listener.lengths(self.index, ticket)
        episode = SimulatedEpisode(ticket, self, lengths, clock.now, self._work.prompt_tokens)
        self.episodes[ticket.ticket_id] = episode
        self._hooks.join(ticket.ticket_id)
        self._listener.issued(episode)

        if not self._deadlines:
            clock.after(ticket.deadline_s, self._check_deadlines)
        self._deadlines.append((clock.now + ticket.deadline_s, episode))

        reset_s = self._slowness * self._work.reset_s.at(normal(episode.stream, 0))

        if reset_s:
            self._in_environment(reset_s, self._generate, episode)
        else:
            self._generate(episode)

    def cancel(self, ticket_id: int) -> None:
        """Unknown tickets are ignored: their end is on the way."""
        episode = self.episodes.get(ticket_id)
        if episode is None:
            return

        if episode.request_id >= 0:
            self._listener.abort(episode)
            episode.ended = True  # the answer to the abort ends the ticket
        else:
            self._end(episode)
            self._clock.post(self._listener.cancelled, ticket_id, episode.begun)

    def answered(self, episode: SimulatedEpisode, tokens: int, reason: str, request: SimulatedRequest) -> None:
        """The answer to the running generation."""
        del self.requests[episode.request_id]
        episode.request_id = -1
        episode.tokens += tokens
        episode.context += tokens

        if episode.ended:  # cancelled meanwhile
            self._end(episode)
            self._clock.post(self._listener.cancelled, episode.ticket.ticket_id, episode.begun)
        elif reason != "stop":
            self._fail(episode, reason)
        else:
            assert request.oldest >= episode.newest_version, "versions go backwards inside an episode"
            episode.newest_version = request.newest
            if episode.oldest_version < 0:
                episode.oldest_version = request.oldest
            self._with_hooks(episode, STEP, self._step)

    def die(self) -> None:
        """Die with all episodes; whoever asked for a generation does not hear of it."""
        self.alive = False
        for episode in list(self.episodes.values()):
            self._end(episode)
        self._deadlines.clear()

    def _generate(self, episode: SimulatedEpisode) -> None:
        self._with_hooks(episode, GENERATE, self._request)

    def _with_hooks(self, episode: SimulatedEpisode, phase: int, go_on: Callable[[SimulatedEpisode], None]) -> None:
        """When every hook lets it: with a per-turn barrier everybody generates, then all environments step."""
        if self._hooks:
            self._hooks.arrive(episode.ticket.ticket_id, phase, lambda: go_on(episode))
        else:
            go_on(episode)

    def _request(self, episode: SimulatedEpisode) -> None:
        if episode.ended:
            return  # cancelled while it waited for the others

        episode.begun += 1
        episode.request_id = self._next_request
        self._next_request += 1
        self.requests[episode.request_id] = episode
        self._listener.generate(episode)

    def _step(self, episode: SimulatedEpisode) -> None:
        if episode.ended:
            return

        work = self._work
        draw = 3 * episode.turn
        seconds = self._slowness * self._listener.step_seconds(episode)

        if work.hang_probability and uniform(episode.stream, draw + 2) < work.hang_probability:
            self._in_environment(work.step_deadline_s, self._broken, episode)
        elif work.fail_probability and uniform(episode.stream, draw + 3) < work.fail_probability:
            self._in_environment(seconds, self._broken, episode)
        elif seconds:
            episode.environment_s += seconds
            self._in_environment(seconds, self._turn_done, episode)
        else:
            self._turn_done(episode)

    def _in_environment(
        self, seconds: float, go_on: Callable[[SimulatedEpisode], None], episode: SimulatedEpisode
    ) -> None:
        """The environment works for so long; if the episode has not ended by then, it goes on."""

        def answer() -> None:
            if not episode.ended:
                go_on(episode)

        self._clock.after(seconds, answer)

    def _broken(self, episode: SimulatedEpisode) -> None:
        self._fail(episode, "environment")

    def _turn_done(self, episode: SimulatedEpisode) -> None:
        """The next turn, unless it was the last one or the context is full (stop reason `context`)."""
        episode.turn += 1
        context = episode.context + self._work.observation_tokens
        if episode.turn < len(episode.lengths) and context < self._max_model_len:
            episode.context = context
            self._generate(episode)
            return

        self._end(episode)
        ticket = episode.ticket
        reward = self._work.reward(ticket.task_index, ticket.seed)

        outcome = EpisodeOutcome(
            timeline=0,
            version=episode.oldest_version,
            reward=reward,
            tokens_generated=episode.tokens,
            length=episode.tokens,
            turns=episode.turn,
            success=reward,
            seconds=self._clock.now - episode.began,
            payload=episode.environment_s,
        )

        self._clock.post(self._listener.finished, ticket.ticket_id, outcome)

    def _fail(self, episode: SimulatedEpisode, reason: str) -> None:
        self._end(episode)
        self._clock.post(self._listener.failed, episode.ticket.ticket_id, reason, episode.begun)

    def _end(self, episode: SimulatedEpisode) -> None:
        episode.ended = True
        self.episodes.pop(episode.ticket.ticket_id, None)
        self._hooks.leave(episode.ticket.ticket_id)

    def _check_deadlines(self) -> None:
        """An episode past its deadline ends `failed`; the deadline is one number, so they stand in order."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][1].ended or deadlines[0][0] <= self._clock.now):
            episode = deadlines.popleft()[1]
            if not episode.ended and self.alive:
                self._overrun(episode)

        if deadlines and self.alive:
            self._clock.at(deadlines[0][0], self._check_deadlines)

    def _overrun(self, episode: SimulatedEpisode) -> None:
        if episode.request_id >= 0:
            self._listener.abort(episode)
            episode.ended = True  # the broker learns it as `cancelled`, which counts as failed
        else:
            self._fail(episode, "deadline")
