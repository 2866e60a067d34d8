"""Tickets: which sample runs next, on which server, by which version (F2), and by when it must have ended."""

from __future__ import annotations

import heapq

from rl.config.seeds import sample_seed
from rl.wire.messages import Ticket, Version
from rollout.broker.actions import IssueTicket
from rollout.broker.deadlines import Deadlines
from rollout.broker.ledger import Ledger
from rollout.broker.records import NAMES, Attempt, Sample, State
from rollout.broker.rules import Rules
from rollout.broker.servers import Server, Servers

_TIMELINES = 1 << 22  # ticket ids of successive timelines never meet, and fit in 62 bits
_EPOCH_TICKETS = 1 << 40


class Tickets:
    def __init__(self, rules: Rules, ledger: Ledger, servers: Servers) -> None:
        self.rules = rules
        self.ledger = ledger
        self.servers = servers
        self.deadlines = Deadlines(ledger, rules.episode_deadline_s)
        self._seed = rules.seed

        self.timeline = -1
        self._next_id = 0
        self._queue: list[tuple[bool, float, int, Sample]] = []  # heap of (first attempt?, order, sample id, sample)

    def begin(self, timeline: int) -> None:
        self.timeline = timeline
        self._next_id = timeline % _TIMELINES * _EPOCH_TICKETS

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def enqueue(self, sample: Sample) -> None:
        """Samples that are tried again go first, then groups in their order and that of their issue."""
        heapq.heappush(self._queue, (sample.failures == 0, sample.group.order, sample.sample_id, sample))

    def issue(self, n: int, oldest_useful: int, now: float) -> list[IssueTicket]:
        """F2: tickets carry version n, the newest. None goes out that no later batch could use."""
        issued: list[IssueTicket] = []
        queue = self._queue
        while queue and n >= oldest_useful:
            sample = queue[0][3]
            if sample.state is not State.QUEUED:
                heapq.heappop(queue)
                continue

            if (server := self.servers.next()) is None:
                break
            heapq.heappop(queue)
            issued.append(self.start(sample, server, n, now))
        return issued

    def start(self, sample: Sample, server: Server, n: int, now: float) -> IssueTicket:
        ticket = Ticket(
            ticket_id=self.new_id(),
            sample_id=sample.sample_id,
            group_id=sample.group.group_id,
            task_index=sample.group.task.task_index,
            version=Version(self.timeline, n),
            attempt=sample.failures,
            deadline_s=self.rules.episode_deadline_s,
            seed=sample_seed(self._seed, sample.sample_id),
            temperature=self.rules.temperature,
        )

        self.ledger.start(Attempt(ticket.ticket_id, sample, server.index, ticket, now))
        self.servers.take(server, ticket.ticket_id)
        self.deadlines.add(ticket.ticket_id, now)
        return IssueTicket(server.index, ticket)

    def end(self, attempt: Attempt, claimed: int = -1) -> None:
        """A ticket has ended, with a trajectory that claims so many tokens (-1: without one)."""
        self.ledger.end(attempt, claimed)
        self.servers.give_back(attempt.server, attempt.ticket_id)

    def retry(self, attempt: Attempt) -> bool:
        """The current attempt at a sample has failed; False if that was its last."""
        sample = attempt.sample
        self.ledger.supersede(sample)
        sample.failures += 1

        again = sample.failures < self.rules.max_attempts
        self.ledger.move(sample, State.QUEUED if again else State.FAILED)
        if again:
            self.enqueue(sample)
        return again

    def revoke(self, attempt: Attempt, end: State) -> None:
        attempt.cut = NAMES[end]
        self.servers.revoke(attempt.server, attempt.ticket_id)
