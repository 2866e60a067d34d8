"""The complete system in virtual time: the production cores of broker, proxy and weight updater, on one clock.

    result = Simulation(scenario).run()

`BrokerCore`, `ProxyCore`, `UpdaterCore`, `Gate` and `BatchModel` are the objects that production runs; only what
takes time (environments, decoding, training, messages) is a model here. A message posted is delivered after what was
posted before it at the same instant, as sockets would do. Every delivery to a core, engine or episode is one event.
"""

from __future__ import annotations

import gc
import math
import time
from collections import deque
from typing import Any

from rl.weights.updater import Notify, Rest, UpdaterCore
from rl.wire.messages import Ticket, Usage, Version, WeightStatus
from rollout.broker.actions import Action as BrokerAction
from rollout.broker.actions import EmitBatch, EpisodeOutcome, Finished, IssueTicket, RevokeTickets, StopRun
from rollout.broker.core import BrokerCore
from rollout.broker.tasks import TaskSource
from rollout.proxy.actions import AbortAt, Forget, Reply, ReportFirstToken, SendTo
from rollout.proxy.actions import Action as ProxyAction
from rollout.proxy.core import ProxyCore
from rollout.simulate.clock import Clock, Handle, SimulationStopped
from rollout.simulate.distributions import normal, uniform
from rollout.simulate.generator import SimulatedGenerator, SimulatedRequest
from rollout.simulate.result import Recorder, SimulationResult
from rollout.simulate.scenario import Scenario
from rollout.simulate.server import SimulatedEpisode, SimulatedServer

TIMELINE = 0
_SERVER_LIFETIMES = 1_000_003
"""Where the streams of the servers' lifetimes begin, after those of the generators."""
_MACHINE_LIFETIMES = 2_000_003


class Simulation:
    """One run. `limit_s`: virtual seconds after which a run that does not end is an error."""

    def __init__(self, scenario: Scenario, *, tasks: TaskSource | None = None, limit_s: float = 1e9) -> None:
        rules = scenario.broker
        machines = scenario.generators

        self.scenario = scenario
        self.limit_s = limit_s
        self.clock = Clock()
        self.record = Recorder(scenario, self.clock)

        self.broker = BrokerCore(rules, tasks=tasks)
        self.proxy = ProxyCore(
            cache_survives_update=machines.on_update == "keep",
            hooks=rules.hooks,
            kv_admission=machines.kv_admission,
        )
        self.updater = UpdaterCore(
            generators=machines.count,
            rolling=machines.rolling and rules.alpha > 0,
            tolerance=1.0,
            probe=False,
        )

        self.generators: list[SimulatedGenerator] = []
        self.servers: dict[int, SimulatedServer] = {}

        self._requests: dict[int, SimulatedRequest] = {}
        """The requests by the proxy's key."""
        self._batches: deque[EmitBatch] = deque()
        self._training = False
        self._next: EmitBatch | None = None
        """The batch that is trained as soon as no engine has the device."""
        self._tick_at = math.inf
        self._serving: dict[int, SimulatedGenerator] = {}
        """Those that are up."""
        self._back_at = [0.0] * scenario.machines.count
        """When each machine is there again, or was."""

    def run(self) -> SimulationResult:
        """Raises SimulationStopped when the broker gives up or nothing can happen before the end."""
        began = time.process_time()
        collecting = gc.isenabled()
        gc.disable()  # a million live records are not garbage

        try:
            self._start()
            self.clock.run(self.limit_s, self.broker.describe)
        finally:
            if collecting:
                gc.enable()

        return self.record.result(self.generators, self.broker, time.process_time() - began)

    def _start(self) -> None:
        for index in range(self.scenario.generators.count):
            self.generators.append(self._new_generator(index, 0))
            self._generator_up(self.generators[index])

        for index in range(self.scenario.servers.count):
            self._server_up(index, 0)

        for machine in range(self.scenario.machines.count):
            self._machine_up(machine, 0)

        self.clock.post(self._publish, 0)

    # ------------------------------------------------------------ broker

    def _broker(self, actions: list[BrokerAction]) -> None:
        for action in actions:
            match action:
                case IssueTicket():
                    self.clock.post(self.servers[action.server].begin, action.ticket)
                case RevokeTickets():
                    self._revoke(action)

                case EmitBatch():
                    self.record.batches.append(action)
                    self._batches.append(action)
                    self.clock.post(self._train)

                case StopRun():
                    raise SimulationStopped(f"at {self.clock.now:.1f} s: {action.reason}")
                case Finished():
                    self.clock.over = True

        deadline = self.broker.next_deadline()
        if deadline is not None and deadline < self._tick_at:
            self._tick_at = deadline
            self.clock.at(deadline, self._tick, deadline)

    def _revoke(self, action: RevokeTickets) -> None:
        self.record.cancels += len(action.ticket_ids)
        if self.scenario.cancellation:
            for ticket_id in action.ticket_ids:
                self.clock.post(self.servers[action.server].cancel, ticket_id)

    def _tick(self, deadline: float) -> None:
        if deadline == self._tick_at:
            self._tick_at = math.inf
            self._broker(self.broker.tick(self.clock.now))

    def finished(self, ticket_id: int, outcome: EpisodeOutcome) -> None:
        self._broker(self.broker.finished(ticket_id, outcome, self.clock.now))

    def failed(self, ticket_id: int, reason: str, turns: int) -> None:
        self.record.failures += 1
        self._broker(self.broker.failed(ticket_id, reason, self.clock.now, turns))

    def cancelled(self, ticket_id: int, turns: int) -> None:
        self._broker(self.broker.cancelled(ticket_id, self.clock.now, turns))

    def _session_began(self, session: int, version: Version) -> None:
        self._broker(self.broker.first_token(session, version, self.clock.now))

    def _usage(self, session: int, tokens: int, lost: bool) -> None:
        self._broker(self.broker.usage(session, tokens, lost, self.clock.now))

    # ------------------------------------------------------------ proxy

    def _proxy(self, actions: list[ProxyAction], tokens: int = 0) -> None:
        """`tokens`: of the answer at hand, which a Reply may forward."""
        for action in actions:
            match action:
                case SendTo():
                    self.clock.post(self.generators[action.generator].receive, self._requests[action.key])
                case AbortAt():
                    self.clock.post(self.generators[action.generator].abort, action.key)

                case Reply():
                    self.clock.post(self._reply, action, tokens if action.forward else 0)
                case Forget():
                    del self._requests[action.key]

                case Usage():
                    self.clock.post(self._usage, action.session, action.tokens, action.lost)
                case ReportFirstToken():
                    oldest = self._requests[action.key].oldest
                    self.clock.post(self._session_began, action.session, Version(TIMELINE, oldest))

    def generate(self, episode: SimulatedEpisode) -> None:
        """The episode's next request, on its way to the proxy."""
        self._hop(self._add, episode)

    def _add(self, episode: SimulatedEpisode) -> None:
        if episode.request_id < 0:
            return  # its server died meanwhile

        ticket = episode.ticket
        room = min(self.scenario.work.max_tokens, self.scenario.generators.max_model_len - episode.context)
        room = max(1, room)
        episode.key = self.proxy.next_key

        self._requests[episode.key] = SimulatedRequest(
            key=episode.key,
            episode=episode,
            session=ticket.ticket_id,
            version=ticket.gate(episode.newest_version),
            prompt_len=episode.context,
            length=min(episode.lengths[episode.turn], room),
            prompt_hash=ticket.group_id,
        )

        self._proxy(
            self.proxy.add(
                self.clock.now,
                episode.server.client,
                episode.request_id,
                session=ticket.ticket_id,
                kind=ticket.kind,
                prompt_len=episode.context,
                max_tokens=room,
                priority=ticket.group_id,
                prompt_hash=None if episode.turn else ticket.group_id,
            )
        )

    def abort(self, episode: SimulatedEpisode) -> None:
        self._hop(self._abort, episode.server.client, episode.request_id)

    def _abort(self, client: tuple[int, int], request_id: int) -> None:
        self._proxy(self.proxy.abort(self.clock.now, client, request_id))

    def _reply(self, reply: Reply, tokens: int) -> None:
        request = self._requests.pop(reply.key)
        episode = request.episode
        assert isinstance(episode, SimulatedEpisode)
        if reply.request_id in episode.server.requests:
            self._hop(episode.server.answered, episode, tokens, reply.finish_reason, request)

    def _hop(self, handle: Handle, *arguments: Any) -> None:
        if self.scenario.hop_s:
            self.clock.after(self.scenario.hop_s, handle, *arguments)
        else:
            self.clock.post(handle, *arguments)

    def first_token(self, generator: SimulatedGenerator, key: int, version: Version) -> None:
        if generator.alive and key in self._requests:
            self._requests[key].oldest = version.n
        self._proxy(self.proxy.first_token(self.clock.now, generator.index, generator.incarnation, key))

    def generated(self, generator: SimulatedGenerator, key: int, tokens: int, reason: str, version: Version) -> None:
        """A request has ended; of a dead generator the proxy knows already."""
        if generator.alive:
            index = generator.index
            if key in self._requests:
                self._requests[key].newest = version.n
            actions = self.proxy.finished(self.clock.now, index, generator.incarnation, key, tokens, reason)
            self._proxy(actions, tokens)

    # ------------------------------------------------------------ learner and weights

    def _publish(self, n: int) -> None:
        now = self.clock.now
        version = Version(TIMELINE, n)
        self.record.published(n, self.generators, self.broker.ledger.generated)
        self._training = False
        self._weights(self.updater.publish(now, version, 0, [], []))
        if self.scenario.generators.alternate:
            self._weights(self.updater.give(now))
        self._broker(self.broker.published(version, now))

        if n == self.scenario.until:
            self.clock.over = True
        else:
            self._broker(self.broker.batch_requested(n, now))
            self._train()

    def _train(self) -> None:
        """The next batch is requested as soon as one has arrived (`rl.learner.run_client`)."""
        if self._training or not self._batches:
            return

        self._training = True
        batch = self._batches.popleft()
        if batch.step + 1 < self.scenario.broker.steps:
            self._broker(self.broker.batch_requested(batch.step + 1, self.clock.now))

        self._next = batch
        if self.scenario.generators.alternate:
            self._weights(self.updater.take(self.clock.now))
        self._step()

    def _step(self) -> None:
        """Train what waits, unless it waits for an engine to rest."""
        batch = self._next
        alternate = self.scenario.generators.alternate
        if batch is None or (alternate and not all(each.resting for each in self._serving.values())):
            return

        self._next = None
        cost = self.scenario.training
        seconds = cost.seconds(batch)
        self.record.train_s += seconds
        self.clock.at(self.clock.now + seconds + cost.publish_s, self._publish, batch.step + 1)

    def _weights(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, Notify):
                generator = self.generators[action.generator]
                self.clock.after(self.scenario.generators.copy_s, self._load, generator, action.notice.version)
            elif isinstance(action, Rest):
                self.clock.post(self.generators[action.generator].rest)

    def _load(self, generator: SimulatedGenerator, version: Version) -> None:
        """Unless it was told to rest meanwhile, which came later."""
        if not (self._training and self.scenario.generators.alternate):
            generator.load(version)

    def weights_status(self, generator: SimulatedGenerator, status: WeightStatus) -> None:
        """A load has ended, or a rest begins: the updater goes on, the proxy learns of the empty prefix cache."""
        now = self.clock.now
        self.clock.events += 1
        self._weights(self.updater.status(now, status))
        self._proxy(self.proxy.status(now, generator.index, generator.incarnation, {}, status.version))
        self._step()

    # ------------------------------------------------------------ machines that come and go

    def _new_generator(self, index: int, incarnation: int) -> SimulatedGenerator:
        return SimulatedGenerator(self.clock, self, index, incarnation, self.scenario.generators)

    def _generator_up(self, generator: SimulatedGenerator) -> None:
        now = self.clock.now
        machine = self.scenario.generators
        index = generator.index
        incarnation = generator.incarnation
        if now < (back_at := self._back_at[self.scenario.machines.of(index, machine.count)]):
            self.clock.at(back_at, self._generator_up, generator)
            return

        self._serving[index] = generator
        self._proxy(
            self.proxy.generator_up(
                now, index, incarnation, machine.capacity, machine.max_num_seqs, machine.max_model_len
            )
        )
        self._weights(self.updater.status(now, WeightStatus(index, incarnation, generator.version)))

        if self.scenario.status_s:
            self.clock.after(self.scenario.status_s, self._status, generator)
        if machine.mtbf_s:
            self.clock.after(self._lifetime(machine.mtbf_s, index, incarnation), self._generator_dies, generator)

    def _status(self, generator: SimulatedGenerator) -> None:
        if generator.alive:
            running = generator.running()
            index = generator.index
            self._proxy(self.proxy.status(self.clock.now, index, generator.incarnation, running, generator.version))
            self.clock.after(self.scenario.status_s, self._status, generator)

    def _generator_dies(self, generator: SimulatedGenerator) -> None:
        now = self.clock.now
        index = generator.index
        if self._serving.get(index) is not generator:
            return  # its machine was lost before

        del self._serving[index]
        generator.die()
        self._proxy(self.proxy.generator_died(now, index, generator.incarnation))
        self._weights(self.updater.peer_died(now, index, generator.incarnation))
        self.record.retire(generator)
        self._step()

        self.generators[index] = self._new_generator(index, generator.incarnation + 1)
        self.clock.after(self.scenario.generators.restart_s, self._generator_up, self.generators[index])

    def _server_up(self, index: int, incarnation: int) -> None:
        servers = self.scenario.servers
        if self.clock.now < (back_at := self._back_at[self.scenario.machines.of(index, servers.count)]):
            self.clock.at(back_at, self._server_up, index, incarnation)
            return

        slowness = servers.slow_factor if index < servers.slow_fraction * servers.count else 1.0
        self.servers[index] = SimulatedServer(self.clock, self, self.scenario, index, incarnation, slowness)
        self._broker(self.broker.server_joined(index, incarnation, servers.capacity, self.clock.now))

        if servers.mtbf_s:
            lifetime = self._lifetime(servers.mtbf_s, _SERVER_LIFETIMES + index, incarnation)
            self.clock.after(lifetime, self._server_dies, index, incarnation)

    def _server_dies(self, index: int, incarnation: int) -> None:
        server = self.servers[index]
        if server.client[1] != incarnation or not server.alive:
            return  # its machine was lost before

        server.die()
        self.record.server_deaths += 1
        self._broker(self.broker.server_left(index, incarnation, self.clock.now))
        self._proxy(self.proxy.client_died(self.clock.now, server.client))
        self.clock.after(self.scenario.servers.restart_s, self._server_up, index, incarnation + 1)

    def _machine_up(self, machine: int, losses: int) -> None:
        machines = self.scenario.machines
        if machines.mtbf_s:
            lifetime = self._lifetime(machines.mtbf_s, _MACHINE_LIFETIMES + machine, losses)
            self.clock.after(lifetime, self._machine_lost, machine, losses)

    def _machine_lost(self, machine: int, losses: int) -> None:
        """All that stands on it dies at once."""
        machines = self.scenario.machines
        self._back_at[machine] = self.clock.now + machines.restart_s
        self.record.machines_lost += 1
        for generator in list(self._serving.values()):
            if machines.of(generator.index, self.scenario.generators.count) == machine:
                self._generator_dies(generator)
        for index, server in self.servers.items():
            if server.alive and machines.of(index, self.scenario.servers.count) == machine:
                self._server_dies(index, server.client[1])
        self.clock.at(self._back_at[machine], self._machine_up, machine, losses + 1)

    def _lifetime(self, mean_s: float, stream: int, incarnation: int) -> float:
        """Seconds, drawn from an exponential distribution."""
        return -mean_s * math.log(uniform(self.scenario.seed * 31 + stream, incarnation))

    # ------------------------------------------------------------ what episodes ask and tell

    def lengths(self, server: int, ticket: Ticket) -> list[int]:
        """Tokens of each turn, as this policy would generate them."""
        return self.scenario.work.lengths(ticket.task_index, ticket.seed)

    def step_seconds(self, episode: SimulatedEpisode) -> float:
        """What the environment takes for this turn."""
        return self.scenario.work.step_s.at(normal(episode.stream, 3 * episode.turn + 1))

    def issued(self, episode: SimulatedEpisode) -> None:
        self.record.issued(episode.lengths, self.broker.servers.outstanding)
