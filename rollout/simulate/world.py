"""The complete system in virtual time: the production cores of broker, proxy and weight updater, one event heap.

    result = World(setting).run()

`BrokerCore`, `ProxyCore`, `UpdaterCore`, `Gate` and `BatchModel` are the objects that production runs; only what
takes time (environments, decoding, training, messages) is a model here. A message posted is delivered after what was
posted before it at the same instant, as sockets would do. Every delivery to a core, engine or episode is one event.
"""

from __future__ import annotations

import gc
import heapq
import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rl.core.messages import Ticket, Version, WeightStatus
from rl.weights.updater import Notify, UpdaterCore
from rollout.broker import BrokerCore
from rollout.broker.actions import Action as BrokerAction
from rollout.broker.actions import EmitBatch, Finished, IssueTicket, Outcome, RevokeTickets, StopRun
from rollout.broker.tasks import TaskSource
from rollout.generator.engines.timing import Timing
from rollout.proxy.core import ProxyCore
from rollout.proxy.state import AbortAt, Forget, Reply, ReportFirstToken, ReportUsage, SendTo
from rollout.proxy.state import Action as ProxyAction
from rollout.simulate.engine import Generator, Request
from rollout.simulate.episode import Episode, Server
from rollout.simulate.laws import normal, uniform
from rollout.simulate.result import Recorder, Result
from rollout.simulate.setting import Setting

EPOCH = 0


class SimulationStopped(RuntimeError):
    """The broker says that the run cannot go on, or nothing can happen any more."""


class World:
    """One run. `limit_s`: virtual seconds after which a run that does not end is an error."""

    def __init__(self, setting: Setting, *, tasks: TaskSource | None = None, limit_s: float = 1e9) -> None:
        self.setting, self.limit_s = setting, limit_s
        self.now = 0.0
        rules = setting.broker.changed(batch_barrier=setting.batch_barrier or setting.broker.batch_barrier)
        self.broker = BrokerCore(rules, tasks=tasks)
        self.proxy = ProxyCore(
            cache_survives_update=setting.engine.on_update == "keep", pin_prompts=setting.pinned_prompts
        )
        self.updater = UpdaterCore(
            generators=setting.engine.count, rolling=setting.engine.rolling and setting.broker.alpha > 0,
            deadline_s=math.inf, tolerance=1.0, probe=False,
        )  # fmt: skip
        self.record = Recorder(setting)
        self.events = 0
        self.core_s = {"broker": 0.0, "proxy": 0.0}
        self.generators: list[Generator] = []
        self.servers: dict[int, Server] = {}
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._requests: dict[int, Request] = {}  # by the proxy's key
        self._first: dict[int, Version] = {}  # key -> version of its first token
        self._timing = Timing(setting.engine.timing())
        self._batches: deque[EmitBatch] = deque()
        self._training = -1  # the step in training
        self._step = 0  # the next step to train
        self._tick_at = math.inf
        self._over = False

    # ------------------------------------------------------------ the loop

    def run(self) -> Result:
        """Raises SimulationStopped when the broker gives up or nothing can happen before the end."""
        began = time.process_time()
        collecting = gc.isenabled()
        gc.disable()  # a million live records are not garbage
        try:
            self._start()
            self._loop()
        finally:
            if collecting:
                gc.enable()
        return self.record.result(self.now, self.generators, self.broker, self.events, time.process_time() - began)

    def _loop(self) -> None:
        heap, inbox = self._heap, self._inbox
        while not self._over:
            while inbox:
                handle, arguments = inbox.popleft()
                self.events += 1
                handle(*arguments)
            if not heap:
                raise SimulationStopped(f"nothing can happen at {self.now:.1f} s: {self.broker.describe()}")
            due, _, handle, arguments = heapq.heappop(heap)
            if due > self.now:
                self.now = due
            if due > self.limit_s:
                raise SimulationStopped(f"no end within {self.limit_s:g} s: {self.broker.describe()}")
            self.events += 1
            handle(*arguments)

    def at(self, when: float, handle: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, handle, arguments))

    def post(self, handle: Callable[..., None], *arguments: Any) -> None:
        self._inbox.append((handle, arguments))

    def _start(self) -> None:
        setting = self.setting
        for index in range(setting.engine.count):
            self.generators.append(Generator(self, index, 0, setting.engine, self._timing))
            self._generator_up(self.generators[index])
        for index in range(setting.servers.count):
            self._server_up(index, 0)
        self.post(self._publish, 0)

    # ------------------------------------------------------------ broker

    def _broker(self, actions: list[BrokerAction]) -> None:
        for action in actions:
            if isinstance(action, IssueTicket):
                self.post(self.servers[action.server].begin, action.ticket)
            elif isinstance(action, RevokeTickets):
                self.record.cancels += len(action.ticket_ids)
                if self.setting.cancellation:
                    for ticket_id in action.ticket_ids:
                        self.post(self.servers[action.server].cancel, ticket_id)
            elif isinstance(action, EmitBatch):
                self.record.batch(self.now, action)
                self._batches.append(action)
                self.post(self._train)
            elif isinstance(action, StopRun):
                raise SimulationStopped(f"at {self.now:.1f} s: {action.reason}")
            elif isinstance(action, Finished):
                self._over = True
        deadline = self.broker.next_deadline()
        if deadline is not None and deadline < self._tick_at:
            self._tick_at = deadline
            self.at(deadline, self._tick, deadline)

    def _tick(self, deadline: float) -> None:
        if deadline == self._tick_at:
            self._tick_at = math.inf
            self._broker(self.broker.tick(self.now))

    def finished(self, ticket_id: int, outcome: Outcome) -> None:
        self._broker(self.broker.finished(ticket_id, outcome, self.now))

    def failed(self, ticket_id: int, reason: str, turns: int) -> None:
        self.record.failures += 1
        self._broker(self.broker.failed(ticket_id, reason, self.now, turns))

    def cancelled(self, ticket_id: int, turns: int) -> None:
        self._broker(self.broker.cancelled(ticket_id, self.now, turns))

    def _first_token(self, session: int, version: Version) -> None:
        self._broker(self.broker.first_token(session, version, self.now))

    def _usage(self, session: int, tokens: int, lost: bool) -> None:
        self._broker(self.broker.usage(session, tokens, lost, self.now))

    # ------------------------------------------------------------ proxy

    def _proxy(self, actions: list[ProxyAction], tokens: int = 0) -> None:
        for action in actions:
            if isinstance(action, SendTo):
                self.post(self.generators[action.generator].receive, self._requests[action.key])
            elif isinstance(action, Reply):
                self.post(self._reply, action, tokens if action.forward else 0)
            elif isinstance(action, ReportUsage):
                self.post(self._usage, action.session, action.tokens, action.lost)
            elif isinstance(action, ReportFirstToken):
                self.post(self._first_token, action.session, self._first[action.key])
            elif isinstance(action, AbortAt):
                self.post(self.generators[action.generator].abort, action.key)
            elif isinstance(action, Forget):
                self._forget(action.key)

    def _forget(self, key: int) -> None:
        del self._requests[key]
        self._first.pop(key, None)

    def generate(self, episode: Episode) -> None:
        """The episode's next request, on its way to the proxy."""
        self._hop(self._add, episode)

    def _add(self, episode: Episode) -> None:
        work, ticket = self.setting.work, episode.ticket
        if episode.request_id < 0:
            return  # its server died meanwhile
        key = episode.key = self.proxy.next_key
        length = episode.lengths[episode.turn]
        room = max(1, min(work.max_tokens, self.setting.engine.max_model_len - episode.context))
        self._requests[key] = Request(
            key, episode, ticket.ticket_id, ticket.version, episode.context, min(length, room), ticket.group_id
        )
        self._proxy(
            self.proxy.add(
                self.now, episode.server.client, episode.request_id, session=ticket.ticket_id, kind=ticket.kind,
                prompt_len=episode.context, max_tokens=room, priority=ticket.group_id,
                prompt_hash=None if episode.turn else ticket.group_id,
            )
        )  # fmt: skip

    def abort(self, episode: Episode) -> None:
        self._hop(self._abort, episode.server.client, episode.request_id)

    def _abort(self, client: tuple[int, int], request_id: int) -> None:
        self._proxy(self.proxy.abort(self.now, client, request_id))

    def _reply(self, reply: Reply, tokens: int) -> None:
        request = self._requests[reply.key]
        version = self._first.get(reply.key)
        self._forget(reply.key)
        episode = request.episode
        assert isinstance(episode, Episode)
        if reply.request_id in episode.server.requests:
            self._hop(episode.server.answered, episode, tokens, reply.finish_reason, version)

    def _hop(self, handle: Callable[..., None], *arguments: Any) -> None:
        if self.setting.hop_s:
            self.at(self.now + self.setting.hop_s, handle, *arguments)
        else:
            self.post(handle, *arguments)

    def first_token(self, generator: Generator, key: int, version: Version) -> None:
        self._first[key] = version
        self._proxy(self.proxy.first_token(self.now, generator.index, generator.incarnation, key))

    def generated(self, generator: Generator, key: int, tokens: int, reason: str) -> None:
        if generator.alive:
            self._proxy(
                self.proxy.finished(self.now, generator.index, generator.incarnation, key, tokens, reason), tokens
            )

    # ------------------------------------------------------------ learner and weights

    def _publish(self, n: int) -> None:
        version = Version(EPOCH, n)
        self.record.published(self.now, n, self.generators, self.broker.ledger.generated)
        self._weights(self.updater.publish(self.now, version, 0, [], []))
        self._broker(self.broker.published(version, self.now))
        self._training = -1
        if n == self.setting.until:
            self._over = True
            return
        self._broker(self.broker.batch_requested(n, self.now))
        self._train()

    def _train(self) -> None:
        """The next batch is requested as soon as one has arrived (`rl.learner.link`)."""
        if self._training >= 0 or not self._batches:
            return
        batch = self._batches.popleft()
        self._training = batch.step
        if batch.step + 1 < self.setting.broker.steps:
            self._broker(self.broker.batch_requested(batch.step + 1, self.now))
        trainer = self.setting.trainer
        tokens = sum(sample.outcome.length for sample in batch.samples)
        seconds = trainer.step_s + trainer.per_sample_s * len(batch.samples) + trainer.per_token_s * tokens
        self.record.train_s += seconds
        self.at(self.now + seconds + trainer.publish_s, self._publish, batch.step + 1)

    def _weights(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Notify):
                generator = self.generators[action.generator]
                self.at(self.now + self.setting.engine.copy_s, generator.load, action.notice.version)

    def weights_loaded(self, generator: Generator, status: WeightStatus) -> None:
        """A load has ended: the updater rolls on, the proxy learns of the empty prefix cache."""
        self.events += 1
        self._weights(self.updater.status(self.now, status))
        self._proxy(self.proxy.status(self.now, generator.index, generator.incarnation, {}, status.version))

    # ------------------------------------------------------------ machines that come and go

    def _generator_up(self, generator: Generator) -> None:
        engine = self.setting.engine
        index, incarnation = generator.index, generator.incarnation
        self._proxy(
            self.proxy.generator_up(
                self.now, index, incarnation, engine.capacity, engine.max_num_seqs, engine.max_model_len
            )
        )
        self._weights(self.updater.status(self.now, WeightStatus(index, incarnation, generator.version)))
        if self.setting.status_s:
            self.at(self.now + self.setting.status_s, self._status, generator)
        if engine.mtbf_s:
            self.at(self.now + self._lifetime(engine.mtbf_s, index, incarnation), self._generator_dies, generator)

    def _status(self, generator: Generator) -> None:
        if generator.alive:
            running = generator.running()
            index, incarnation = generator.index, generator.incarnation
            self._proxy(self.proxy.status(self.now, index, incarnation, running, generator.version))
            self.at(self.now + self.setting.status_s, self._status, generator)

    def _generator_dies(self, generator: Generator) -> None:
        generator.die()
        index, engine = generator.index, self.setting.engine
        self._proxy(self.proxy.generator_died(self.now, index, generator.incarnation))
        self._weights(self.updater.peer_died(self.now, index, generator.incarnation))
        self.record.retire(generator)
        reborn = Generator(self, index, generator.incarnation + 1, engine, self._timing)
        self.generators[index] = reborn
        self.at(self.now + engine.restart_s, self._generator_up, reborn)

    def _server_up(self, index: int, incarnation: int) -> None:
        servers = self.setting.servers
        slow = index < servers.slow_fraction * servers.count
        self.servers[index] = Server(self, index, incarnation, servers.slow_factor if slow else 1.0)
        self._broker(self.broker.server_joined(index, incarnation, servers.capacity, self.now))
        if servers.mtbf_s:
            lifetime = self._lifetime(servers.mtbf_s, 1_000_003 + index, incarnation)
            self.at(self.now + lifetime, self._server_dies, index, incarnation)

    def _server_dies(self, index: int, incarnation: int) -> None:
        server = self.servers[index]
        server.die()
        self.record.server_deaths += 1
        self._broker(self.broker.server_left(index, incarnation, self.now))
        self._proxy(self.proxy.client_died(self.now, server.client))
        self.at(self.now + self.setting.servers.restart_s, self._server_up, index, incarnation + 1)

    def _lifetime(self, mean_s: float, index: int, incarnation: int) -> float:
        return -mean_s * math.log(uniform(self.setting.seed * 31 + index, incarnation))

    # ------------------------------------------------------------ what episodes ask and tell

    def lengths(self, server: int, ticket: Ticket) -> list[int]:
        """Tokens of each turn, as this policy would generate them."""
        return self.setting.work.lengths(ticket.task_index, ticket.seed)

    def step_seconds(self, episode: Episode) -> float:
        """What the environment takes for this turn."""
        return self.setting.work.step_s.at(normal(episode.stream, 3 * episode.turn + 1))

    def reward(self, task: int, seed: int) -> float:
        work = self.setting.work
        odds = math.log(work.success / (1 - work.success)) if 0 < work.success < 1 else 50.0 * (work.success - 0.5)
        odds += work.success_spread * normal(task * 104_729 + 5, 1)
        return float(uniform(seed, 1) < 1 / (1 + math.exp(-odds)))

    def issued(self, episode: Episode) -> None:
        self.record.issued_episodes += 1
        self.record.issued_tokens += sum(episode.lengths)
        self.record.issued_turns += len(episode.lengths)
        self.record.peak_open = max(self.record.peak_open, self.broker.servers.outstanding)

    def environment_begins(self) -> None:
        self.record.environments(self.now, +1)

    def environment_ends(self) -> None:
        self.record.environments(self.now, -1)
