"""A small random world around BrokerCore: servers, generators and a learner that do as they like, in any order.

After every event it checks what must hold at every instant, from scratch and independently of the core's own books.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from rl.config.section import split_named
from rl.wire.messages import Ticket, Trajectory, Version
from rollout.broker.actions import (
    Action,
    EmitBatch,
    EpisodeOutcome,
    EvalReport,
    Finished,
    GroupRecord,
    IssueTicket,
    RevokeTickets,
    StopRun,
)
from rollout.broker.assembly import outcome_of
from rollout.broker.core import BrokerCore
from rollout.broker.rules import Rules
from rollout.broker.validation import fault
from tests.rollout.broker.audited import AuditedLedger
from tests.rollout.broker.corruptions import CORRUPTIONS
from tests.rollout.trajectories import make_trajectory

VOCABULARY = 1 << 20


@dataclass
class Episode:
    ticket: Ticket
    server: int
    versions: list[int] = field(default_factory=list)  # of its tokens so far, over all turns
    cancelled: bool = False
    unreported: list[tuple[int, bool]] = field(default_factory=list)  # usage not told yet: tokens, lost?


class World:
    """`step()` lets one random thing happen; `finish_all()` completes work until the run ends."""

    def __init__(self, rules: Rules, seed: int, *, servers: int = 2, capacity: int = 8, prefetch: bool = True):
        self.core = BrokerCore(rules, ledger=AuditedLedger())
        self.rules = rules
        self.random = random.Random(seed)
        self.now = 0.0
        self.timeline = 0

        self.running: dict[int, Episode] = {}
        self.late_usage: list[tuple[int, int, bool]] = []  # of ended tickets
        self.ended: list[tuple[int, EpisodeOutcome]] = []  # results that may be sent again
        self.servers: dict[int, tuple[int, int]] = {}  # index -> incarnation, capacity

        self.prefetch = prefetch
        self.published = -1
        self.asked = 0  # steps requested
        self.batches: dict[int, EmitBatch] = {}
        self.trained: set[int] = set()
        self.records: list[GroupRecord] = []
        self.evals: list[EvalReport] = []
        self.report: dict[str, Any] | None = None
        self.stopped = ""
        self.refused = 0  # trajectories

        self.do(self.core.server_joined(7, 0, 0, self.now))  # a server without seats gets no ticket
        for index in range(servers):
            self.join(index, 0, capacity)

    # ------------------------------------------------------------ what the world does

    def join(self, index: int, incarnation: int, capacity: int) -> None:
        self.servers[index] = (incarnation, capacity)
        self.do(self.core.server_joined(index, incarnation, capacity, self.now))

    def kill(self, index: int) -> None:
        incarnation, capacity = self.servers[index]
        for ticket_id, episode in list(self.running.items()):
            if episode.server == index:
                self.close(ticket_id)
        self.do(self.core.server_left(index, incarnation, self.now))
        self.join(index, incarnation + 1, capacity)

    def publish(self) -> None:
        self.published += 1
        if self.published:
            self.trained |= {sample.sample_id for sample in self.batches[self.published - 1].samples}
        self.do(self.core.published(Version(self.timeline, self.published), self.now))
        if self.published == self.rules.steps and self.rules.eval_tasks:
            self.evaluate()

    def evaluate(self) -> None:
        """Once for each version, and as early or late as it may be asked for."""
        self.do(self.core.eval_requested(Version(self.timeline, self.published), self.rules.eval_tasks or 2, self.now))

    def tick(self) -> None:
        """What was due is done: nobody waits for a time that has passed."""
        self.do(self.core.tick(self.now))
        due = self.core.next_deadline()
        assert due is None or due > self.now

    def request(self) -> None:
        self.do(self.core.batch_requested(self.asked, self.now))
        self.asked += 1

    def generate(self, ticket_id: int, *, told: bool = True) -> None:
        """A turn, or the rest of one that was cut, by any generator that the gate lets answer.

        Generators stand at different versions, and one may load a newer version while it runs a request. One that
        dies may have told the first token; what it sampled is lost, and another generator is asked.
        """
        episode = self.running[ticket_id]
        is_first = not episode.versions
        gate = episode.ticket.gate(max(episode.versions, default=-1)).n

        while True:
            began = self.random.randint(gate, self.published)
            ended = self.random.randint(began, self.published)
            versions = [began] * self.random.randint(1, 4) + [ended] * self.random.randint(0, 4)
            is_lost = self.random.random() < 0.1
            episode.unreported.append((len(versions), is_lost))
            if is_first and told:
                self.do(self.core.first_token(ticket_id, Version(self.timeline, began), self.now))
            if not is_lost:
                break

        episode.versions += versions

    def tell_usage(self, ticket_id: int) -> None:
        for tokens, is_lost in self.running[ticket_id].unreported:
            self.do(self.core.usage(ticket_id, tokens, is_lost, self.now))
        self.running[ticket_id].unreported.clear()

    def finish(self, ticket_id: int, reward: float | None = None) -> None:
        """With a last turn; if it is the first one, its FirstToken is late or never comes."""
        trajectory = self.trajectory(ticket_id, float(self.random.random() < 0.5) if reward is None else reward)
        assert self.fault(trajectory) == ""
        outcome = outcome_of(trajectory)
        self.close(ticket_id)
        self.ended.append((ticket_id, outcome))
        self.do(self.core.finished(ticket_id, outcome, self.now))

    def deliver_nonsense(self, ticket_id: int) -> None:
        """What a faulty environment server made of it; it is tried again."""
        field = self.random.choice([name for name in CORRUPTIONS if name != "policy_version"])  # may be a true one here
        wrong = self.fault(CORRUPTIONS[field](self.trajectory(ticket_id, 1.0), self.random, VOCABULARY))
        assert wrong, field
        self.refused += 1
        self.close(ticket_id)
        self.do(self.core.refused(ticket_id, wrong, self.now))

    def trajectory(self, ticket_id: int, reward: float) -> Trajectory:
        self.generate(ticket_id, told=False)
        episode = self.running[ticket_id]
        return make_trajectory(episode.ticket, 0, reward, versions=episode.versions)

    def fault(self, trajectory: Trajectory) -> str:
        return fault(
            trajectory,
            self.core.ticket(trajectory.ticket_id),
            Version(self.core.timeline, self.core.groups.e),
            VOCABULARY,
        )

    def fail(self, ticket_id: int) -> None:
        self.close(ticket_id)
        self.do(self.core.failed(ticket_id, "environment error", self.now))

    def confirm_cancel(self, ticket_id: int) -> None:
        self.close(ticket_id)
        self.do(self.core.cancelled(ticket_id, self.now))

    def lose_reports(self) -> None:
        """The proxy dies: some usage is never told, some turns were told and are asked for again."""
        self.core.ledger.reports_lost()
        self.late_usage = [usage for usage in self.late_usage if self.random.random() < 0.5]
        for episode in self.running.values():
            episode.unreported = [usage for usage in episode.unreported if self.random.random() < 0.5]
            episode.unreported += [(self.random.randint(1, 4), False)] * self.random.randint(0, 1)

    def close(self, ticket_id: int) -> None:
        episode = self.running.pop(ticket_id)
        if episode.ticket.kind == "train":
            self.late_usage += [(ticket_id, *usage) for usage in episode.unreported]

    def step(self) -> None:
        """One thing that can happen now, at random."""
        self.now += self.random.random()
        choices = [self._episode_event] * 12 + [self._late_usage, self._duplicate]
        if self.published < 0 or self.published in self.batches:
            choices.append(self.publish)
        if self.published >= 0 and self.asked <= self.published + self.prefetch and self.asked < self.rules.steps:
            choices += [self.request] * 2
        if self.random.random() < 0.02:
            choices.append(lambda: self.kill(self.random.choice(list(self.servers))))
        if self.random.random() < 0.02:
            choices.append(self.lose_reports)
        if self.random.random() < 0.1:
            choices.append(self.tick)
        if self.published >= 0 and self.report is None and self.random.random() < 0.05:
            choices.append(self.evaluate)
        self.random.choice(choices)()

    def _episode_event(self) -> None:
        if not self.running:
            return
        ticket_id = self.random.choice(list(self.running))
        episode = self.running[ticket_id]

        what = self.random.random()
        if episode.cancelled and what < 0.5:
            self.confirm_cancel(ticket_id)
        elif what < (0.2 if episode.versions else 0.6):
            self.generate(ticket_id)
        elif what < 0.7:
            self.tell_usage(ticket_id) if episode.ticket.kind == "train" else None
        elif what < 0.74:
            self.fail(ticket_id)
        elif what < 0.78:
            self.deliver_nonsense(ticket_id)
        else:
            self.finish(ticket_id)

    def _late_usage(self) -> None:
        if self.late_usage:
            ticket_id = self.random.choice(self.late_usage)[0]
            first = next(usage for usage in self.late_usage if usage[0] == ticket_id)  # the proxy tells them in order
            self.late_usage.remove(first)
            self.do(self.core.usage(*first, self.now))

    def _duplicate(self) -> None:
        if self.ended:
            self.do(self.core.finished(*self.random.choice(self.ended), self.now))

    def finish_all(self, limit: int = 200_000) -> None:
        """A driver that only completes work must reach the end: no live-lock, no dead-lock."""
        for _ in range(limit):
            if self.report is not None or self.stopped:
                return

            self.now += 0.01
            if self.published < 0 or self.published in self.batches:
                self.publish()
            elif self.asked <= self.published and self.asked < self.rules.steps:
                self.request()
            elif self.running:
                ticket_id = self.random.choice(list(self.running))
                self.confirm_cancel(ticket_id) if self.running[ticket_id].cancelled else self.finish(ticket_id)
            elif self.late_usage:
                self._late_usage()

            else:
                deadline = self.core.next_deadline()
                assert deadline is not None, f"nothing can happen any more: {self.core.describe()}"
                self.now = max(self.now, deadline)
                self.tick()
        raise AssertionError(f"no end in {limit} events: {self.core.describe()}")

    # ------------------------------------------------------------ what the core asks, and what must hold

    def do(self, actions: list[Action]) -> None:
        """What one turn asks happens at one instant: a sample's old ticket is cancelled beside its new one."""
        for action in sorted(actions, key=lambda action: not isinstance(action, RevokeTickets)):
            match action:
                case IssueTicket():
                    self._issued(action)
                case RevokeTickets():
                    for ticket_id in action.ticket_ids:
                        if ticket_id in self.running:  # else its end is on the way
                            assert self.running[ticket_id].server == action.server
                            self.running[ticket_id].cancelled = True

                case EmitBatch():
                    self._emitted(action)
                case GroupRecord():
                    self.records.append(action)
                case EvalReport():
                    self.evals.append(action)
                case Finished():
                    self.report = action.report
                case StopRun():
                    self.stopped = action.reason
        self.check()

    def _issued(self, action: IssueTicket) -> None:
        ticket = action.ticket
        assert self.published >= 0, "nothing is issued before the first version"
        assert ticket.ticket_id not in self.running
        if ticket.kind == "train":
            assert ticket.version == Version(self.timeline, self.published)
            others = [e for e in self.running.values() if e.ticket.sample_id == ticket.sample_id and not e.cancelled]
            assert all(other.server != action.server for other in others), "a second copy runs elsewhere"
            assert len(others) <= any(split_named(each)[0] == "hedging" for each in self.rules.hooks)
        self.running[ticket.ticket_id] = Episode(ticket, action.server)
        used = sum(episode.server == action.server for episode in self.running.values())
        assert used <= self.servers[action.server][1], "more tickets than seats"

    def _emitted(self, batch: EmitBatch) -> None:
        rules = self.rules
        assert batch.step not in self.batches
        assert len(batch.samples) == rules.groups_per_batch * rules.group_size
        by_group: dict[int, int] = {}
        for sample in batch.samples:
            by_group[sample.group_id] = by_group.get(sample.group_id, 0) + 1
            assert sample.sample_id // rules.members == sample.group_id
            tokens = sample.outcome.payload.sequence
            oldest = int(tokens.policy_version[tokens.loss_mask != 0].min())
            assert sample.version <= oldest and batch.step - oldest <= rules.staleness_bound, "F4, for every token"

        assert set(by_group.values()) == {rules.group_size}, "whole groups"
        earlier = {s.sample_id for other in self.batches.values() for s in other.samples}
        assert not earlier & {s.sample_id for s in batch.samples}, "nothing is batched twice"

        sign = -1 if rules.priority == "freshest" else 1
        cut_offs = {group.group_id: group.task.cut_offs for group in self.core.batches.untrained[batch.step]}
        order = [(sign * s.version, -cut_offs[s.group_id], s.group_id, s.sample_id) for s in batch.samples]
        assert order == sorted(order)
        self.batches[batch.step] = batch

    @property
    def ledger(self) -> AuditedLedger:
        assert isinstance(self.core.ledger, AuditedLedger)
        return self.core.ledger

    def check(self) -> None:
        core = self.core
        core.ledger.check()
        tokens = core.ledger.report()["tokens"]
        used = sum(tokens[state] for state in ("running", "waiting", "batched", "trained"))
        assert tokens["generated"] == used + core.ledger.unused, "what is neither open nor trained"
        assert core.stats.freshness_violations == 0
        assert len(core.groups.open) <= self.rules.admitted(max(0, self.published)), "F1"
        assert core.servers.outstanding == len(self.running)
