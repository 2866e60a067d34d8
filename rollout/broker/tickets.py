"""Tickets: which sample runs next, on which server, by which version (F2), and by when it must have ended.

A sample runs on one ticket. A policy may ask for a second one, a spare copy: the first to finish counts, and when one
fails the other goes on.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

from rl.core.messages import Ticket, Version
from rl.core.seeds import sample_seed
from rollout.broker.actions import IssueTicket, RevokeTickets
from rollout.broker.ledger import Ledger
from rollout.broker.records import NAMES, Attempt, Sample, State
from rollout.broker.rules import Rules
from rollout.broker.servers import Server, Servers

BACKSTOP_S = 30.0  # an environment server ends its own overdue episodes; after this much longer the broker does
_EPOCHS = 1 << 22  # ticket ids of successive epochs never meet, and fit in 62 bits
_EPOCH_TICKETS = 1 << 40


class Tickets:
    def __init__(self, rules: Rules, ledger: Ledger, servers: Servers) -> None:
        self.rules = rules
        self.ledger = ledger
        self.servers = servers
        self._deadline_s = rules.episode_deadline_s  # reading a pydantic field takes 0.1 us
        self._seed = rules.seed
        self._temperature = rules.temperature

        self.epoch = -1
        self.spares = 0  # samples that have one
        self._next_id = 0
        self._queue: list[tuple[bool, float, int, Sample]] = []  # heap of (first attempt?, rank, sample id, sample)
        self._due: deque[tuple[float, int]] = deque()  # (deadline, ticket), in order
        self._revoked: dict[int, list[int]] = {}  # by server, in this turn

    def begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._next_id = epoch % _EPOCHS * _EPOCH_TICKETS

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    # ------------------------------------------------------------ from the queue to a server

    def enqueue(self, sample: Sample) -> None:
        """Samples that are tried again go first, then groups in the order of their rank and issue."""
        first = sample.failures == 0
        heapq.heappush(self._queue, (first, sample.group.rank, sample.sample_id, sample))

    def issue(self, n: int, floor: int, now: float) -> list[IssueTicket]:
        """F2: tickets carry version n, the newest. None goes out while n < floor: no later batch could use it."""
        issued: list[IssueTicket] = []
        queue = self._queue
        while queue and n >= floor:
            sample = queue[0][3]
            if sample.state is not State.QUEUED:
                heapq.heappop(queue)
                continue

            server = self.servers.next()
            if server is None:
                break
            heapq.heappop(queue)
            issued.append(self._start(sample, server, n, now))
        return issued

    def copy(self, slow: Attempt, n: int, floor: int, now: float) -> list[IssueTicket]:
        """A second ticket for a running sample, on another server, if one has credit."""
        server = self.servers.next(avoid=slow.server)
        if server is None or n < floor:
            return []
        self.spares += 1
        return [self._start(slow.sample, server, n, now, spare=True)]

    def _start(self, sample: Sample, server: Server, n: int, now: float, *, spare: bool = False) -> IssueTicket:
        attempt = Attempt(self.new_id(), sample, server.index, n, now, spare)
        self.ledger.start(attempt)
        self.servers.take(server, attempt.ticket_id)
        self._due.append((now + self._deadline_s + BACKSTOP_S, attempt.ticket_id))

        ticket = Ticket(
            ticket_id=attempt.ticket_id,
            sample_id=sample.sample_id,
            group_id=sample.group.group_id,
            task_index=sample.group.assignment.task_index,
            version=Version(self.epoch, n),
            attempt=sample.failures,
            deadline_s=self._deadline_s,
            seed=sample_seed(self._seed, sample.sample_id),
            temperature=self._temperature,
        )
        return IssueTicket(server.index, ticket)

    # ------------------------------------------------------------ to their end

    def end(self, attempt: Attempt, claimed: int = -1) -> None:
        """A ticket has ended, with a trajectory that claims so many tokens (-1: without one)."""
        self.ledger.end(attempt, claimed)
        self.servers.give_back(attempt.server, attempt.ticket_id)

    def settle(self, attempt: Attempt) -> None:
        """A sample has its result: another copy of it is revoked."""
        sample = attempt.sample
        other = sample.attempt
        if attempt is not other and other is not None:
            self._promote(sample)
            self.revoke(other, State.REDUNDANT)
        self.drop_spare(sample)

    def retry(self, attempt: Attempt) -> bool:
        """The current attempt at a sample has failed; False if that was its last."""
        sample = attempt.sample
        self.ledger.supersede(sample)
        sample.failures += 1

        if sample.spare is not None:
            self._promote(sample)
        elif sample.failures < self.rules.max_attempts:
            self.ledger.move(sample, State.QUEUED)
            self.enqueue(sample)
        else:
            self.ledger.move(sample, State.FAILED)
        return sample.state is not State.FAILED

    def revoke(self, attempt: Attempt, end: State) -> None:
        attempt.cut = NAMES[end]
        self._revoked.setdefault(attempt.server, []).append(attempt.ticket_id)

    def drop_spare(self, sample: Sample) -> None:
        if sample.spare is not None:
            if sample.spare.live:
                self.revoke(sample.spare, State.REDUNDANT)
            sample.spare = None
            self.spares -= 1

    def _promote(self, sample: Sample) -> None:
        self.ledger.promote(sample)
        self.spares -= 1

    def revocations(self) -> Iterable[RevokeTickets]:
        """What was revoked since the last call, one action a server."""
        if not self._revoked:
            return ()
        revoked = [RevokeTickets(server, ticket_ids) for server, ticket_ids in self._revoked.items()]
        self._revoked = {}
        return revoked

    # ------------------------------------------------------------ deadlines

    def overdue(self, now: float) -> Iterator[Attempt]:
        """Attempts of running samples whose server should have ended them long ago."""
        while self._due and self._due[0][0] <= now:
            attempt = self.ledger.live(self._due.popleft()[1])
            if attempt is not None and attempt.sample.state is State.RUNNING:
                yield attempt

    def next_deadline(self) -> float | None:
        while self._due:
            due, ticket_id = self._due[0]
            if self.ledger.live(ticket_id) is not None:
                return due
            self._due.popleft()
        return None
