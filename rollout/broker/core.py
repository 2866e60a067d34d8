"""BrokerCore: who may run, what is fresh, what is trained. A pure state machine (DESIGN section 3).

Events are methods; each takes the caller's clock (`now`, seconds) and returns the actions to carry out,
in order. No sockets, no clock, no threads; the production shell, the tests and the virtual-time simulator drive
this same object.

    core = BrokerCore(Rules(steps=10, groups_per_batch=4, group_size=8, train_tasks=100))
    core.server_joined(0, 0, capacity=64, now=0.0)
    actions = core.published(Version(0, 0), now=0.0)      # the first version: IssueTicket(...) for F1's groups
    actions = core.batch_requested(0, now=0.1)            # nothing yet
    actions = core.finished(ticket_id, Outcome(...), now=1.0)  # ..., EmitBatch once B groups are in

n = published version = batches trained; e = the next step to be assembled (n <= e). Where the rules meet:

* **F1** `Rules.admitted(n)`, whole groups; a group's tickets go out in order of (retry first, rank, issue number).
* **F2** tickets carry the version at which they go out. None goes out while n < e - S: no later batch could use it.
* **F3** an unbatched group with v < e - S fits no later batch and ends `stale`, its task in front again with
  attempts + 1. e >= n, so this is F3's bound n - S, applied as soon as it is certain (at assembly), not only at
  publication. Groups cut off by the assembly of a batch while R > 0 count as `redundant`, up to R per batch.
* **F4** B ready groups by (v, issue number), at the learner's request for step e.
* **F5** `GroupBook.held_for(e - S)`, at most `hold_deadline_s` from the moment B groups were ready and requested.
* Filtering: at most `max_filtered_per_step` constant groups are dropped per step, the next ones are kept: a batch
  always has B whole groups.
* A member that fails is tried again before anything new; after `max_attempts` it ends `failed`. When fewer than G
  members can still deliver, the group is given up (`failed`) and another task takes its place.

Every ticket ends once: finished, failed, cancelled, or by the death of its server. What is
reported for a ticket after its end is dropped, so a sample counts once whatever is sent again.
"""

from __future__ import annotations

import heapq
from typing import Any

from rl.core.messages import Ticket, Version
from rl.core.seeds import sample_seed
from rollout.broker.actions import Action, IssueTicket, Outcome, RevokeTickets
from rollout.broker.journal import restore, snapshot
from rollout.broker.lifecycle import Lifecycle
from rollout.broker.records import Attempt, Group, State

BACKSTOP_S = 30.0  # an environment server ends its own overdue episodes; after this much longer the broker does
_EPOCHS, _EPOCH_TICKETS = 1 << 22, 1 << 40  # ticket ids of successive epochs never meet, and fit in 62 bits


class BrokerCore(Lifecycle):
    """The events; what happens to groups in between stands in `Lifecycle`, whose constructor this shares."""

    # ------------------------------------------------------------ events: learner

    def published(self, version: Version, now: float) -> list[Action]:
        """Version n is loaded nowhere yet, but trained and on its way. The first one starts the epoch."""
        if not self.started:
            if version.n != self.n:
                self._stop(f"the learner starts at version {version.n}, the broker at {self.n}")
            self.started, self.epoch = True, version.epoch
            self._next_ticket = version.epoch % _EPOCHS * _EPOCH_TICKETS
        elif version.epoch != self.epoch:
            self._stop(f"the learner publishes in epoch {version.epoch}, this run is in epoch {self.epoch}")
        elif version.n == self.n + 1 and self.n in self.batches:
            self._trained(now)
        elif version.n > self.n:
            self._stop(f"the learner publishes version {version.n} after {self.n} without that batch")
        return self._turn(now)

    def batch_requested(self, step: int, now: float) -> list[Action]:
        """The learner wants batch `step`; it may ask for the next one while it trains (prefetch)."""
        if step >= self.e:
            self.requested.setdefault(step, now)
        return self._turn(now)

    def eval_requested(self, version: Version, tasks: int, now: float) -> list[Action]:
        self.evaluations.request(version, tasks, now)
        return self._turn(now)

    # ------------------------------------------------------------ events: environment servers

    def server_joined(self, server: int, incarnation: int, capacity: int, now: float) -> list[Action]:
        """Idempotent; a newer incarnation replaces an older one whose death was not announced yet."""
        if self.servers.is_dead(server, incarnation):
            return []
        known = self.servers.by_index.get(server)
        if known is not None and known.incarnation > incarnation:
            return []
        if known is not None and known.incarnation < incarnation:
            self._lose_server(server, known.incarnation, now)
        self.servers.join(server, incarnation, capacity, now)
        return self._turn(now)

    def server_left(self, server: int, incarnation: int, now: float) -> list[Action]:
        """The server is dead for certain: what it held is tried again."""
        self._lose_server(server, incarnation, now)
        return self._turn(now)

    def finished(self, ticket_id: int, outcome: Outcome, now: float) -> list[Action]:
        if ticket_id in self.evaluations.running:
            self._end_evaluation(ticket_id, outcome, now)
            return self._turn(now)
        attempt = self.ledger.attempts.get(ticket_id)
        if attempt is None or not attempt.live:
            self.stats.duplicates += 1
            return []
        self._given_up = 0
        self.stats.issued.add(outcome)
        self.hedging.finished(now - attempt.issued_at)
        self.servers.succeeded(attempt.server)
        self._end_ticket(attempt, outcome.tokens_generated)
        if attempt.cut:  # it ended before the cancel reached it
            self.stats.cut_finished(attempt.cut, outcome)
        sample = attempt.sample
        if sample.state is State.RUNNING and (sample.attempt is attempt or sample.hedge is attempt):
            if outcome.epoch != self.epoch:
                self.stats.other_epoch += 1
                self._end_group(sample.group, State.STALE, now)
            else:
                self._win(sample, attempt)
                self._accept(sample, attempt, outcome, now)
        return self._turn(now)

    def failed(self, ticket_id: int, reason: str, now: float, turns: int | None = None) -> list[Action]:
        """The environment server could not bring the episode to its end; `turns`: begun by then, None: unknown."""
        attempt = self.ledger.attempts.get(ticket_id) or self.evaluations.running.get(ticket_id)
        if attempt is not None and self._is_live(ticket_id):
            self.servers.failed(attempt.server, now)
        return self._without_result(ticket_id, reason, now, turns)

    def _without_result(self, ticket_id: int, reason: str, now: float, turns: int | None) -> list[Action]:
        if ticket_id in self.evaluations.running:
            self._end_evaluation(ticket_id, None, now)
        else:
            attempt = self.ledger.attempts.get(ticket_id)
            if attempt is None or not attempt.live:
                return []
            self._end_ticket(attempt)
            self.stats.cut_running(attempt, turns, now)
            self._retry(attempt, reason, now)
        return self._turn(now)

    def cancelled(self, ticket_id: int, now: float, turns: int | None = None) -> list[Action]:
        """The answer to a cancel; of a ticket that was not cancelled it is a failure."""
        return self._without_result(ticket_id, "cancelled by its environment server", now, turns)

    # ------------------------------------------------------------ events: proxy and clock

    def first_token(self, ticket_id: int, version: Version, now: float) -> list[Action]:
        """The first token of an episode was sampled by `version`; it may expire the group at once (F3)."""
        attempt = self.ledger.attempts.get(ticket_id)
        if attempt is None or attempt.sample.state is not State.RUNNING:
            return []
        sample, group = attempt.sample, attempt.sample.group
        if attempt is sample.hedge:
            attempt.version = version.n if attempt.version is None else min(attempt.version, version.n)
            return []
        if attempt is not sample.attempt:
            return []
        if version.epoch != self.epoch:
            self.stats.other_epoch += 1
            self._end_group(group, State.STALE, now)
        elif sample.version is None or version.n < sample.version:
            sample.version = version.n
            if group.version is None or version.n < group.version:
                self._age(group, version.n, now)
        return self._turn(now)

    def usage(self, ticket_id: int, tokens: int, lost: bool, now: float) -> list[Action]:
        """Tokens that a generator sampled for a training ticket; of evaluations nothing is counted."""
        attempt = self.ledger.attempts.get(ticket_id)
        if attempt is not None or ticket_id not in self.evaluations.tickets:
            self.ledger.usage(ticket_id, tokens, lost)
            if attempt is not None and attempt.cut and not attempt.live and attempt.claimed < 0 and not lost:
                self.stats.cut_late(attempt.cut, tokens)
        return self._turn(now) if self._drain_since is not None else []

    def tick(self, now: float) -> list[Action]:
        """Deadlines; due at `next_deadline()`, harmless at any other time."""
        while self._overdue and self._overdue[0][0] <= now:
            attempt = self.ledger.attempts.get(self._overdue.popleft()[1])
            if attempt is None or not attempt.live or attempt.sample.state is not State.RUNNING:
                continue
            if attempt is attempt.sample.hedge:
                self._drop_hedge(attempt.sample)
            elif attempt is attempt.sample.attempt:
                self._cancel(attempt, State.FAILED)
                self.servers.failed(attempt.server, now)
                self._retry(attempt, f"no end {BACKSTOP_S:g} s after its deadline", now)
        return self._turn(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, as far as is known now."""
        while self._overdue and not self._is_live(self._overdue[0][1]):
            self._overdue.popleft()
        due = [self._overdue[0][0]] if self._overdue else []
        if self._hold_since is not None:
            due.append(self._hold_since + self.settings.hold_deadline_s)
        if self._drain_since is not None and self.finished_at is None:
            due.append(self._drain_since + self.settings.drain_deadline_s)
        if self.started and not self.stopped:
            due += [each for each in (self.hedging.next_due(), self.servers.next_release()) if each is not None]
        return min(due, default=None)

    def _is_live(self, ticket_id: int) -> bool:
        attempt = self.ledger.attempts.get(ticket_id)
        return (attempt is not None and attempt.live) or ticket_id in self.evaluations.running

    # ------------------------------------------------------------ journal

    def snapshot(self) -> dict[str, Any]:
        """Plain data for a checkpoint at version n (`journal.py`)."""
        return snapshot(self)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a snapshot; only a core that has seen no event may do so."""
        restore(self, state)

    # ------------------------------------------------------------ one turn

    def _turn(self, now: float) -> list[Action]:
        """After every event: assemble what is due, admit, issue, and see whether this is the end."""
        if self.started and not self.stopped:
            self.servers.release(now)
            while self._assemble(now):
                pass
            if len(self.groups) < self.limit and self._may_begin():
                self._admit(now)
            self._issue(now)
            self._hedge(now)
            if self.n == self.settings.steps:
                self._drain(now)
        if self._cancels:
            self._out += [RevokeTickets(server, ticket_ids) for server, ticket_ids in self._cancels.items()]
            self._cancels = {}
        out, self._out = self._out, []
        return out

    def _admit(self, now: float) -> None:
        if self.e == self.settings.steps:
            return  # all steps are assembled
        while len(self.groups) < self.limit:
            group_id, assignment = self.tasks.take()
            group = Group(group_id, assignment, self.settings.members, self.priority.issue(assignment), now)
            self.groups[group_id] = group
            for sample in group.members:
                self.ledger.issue(sample)
                self._enqueue(sample)

    def _issue(self, now: float) -> None:
        """Tickets while there is credit: evaluations, then retries, then groups in order of issue."""
        usable = self.n >= self.floor
        while self.evaluations.queue or (usable and self._next_queued()):
            server = self.servers.next()
            if server is None:
                return
            ticket_id = self._next_ticket
            self._next_ticket += 1
            if self.evaluations.queue:
                ticket = self._evaluation_ticket(ticket_id, server.index)
            else:
                ticket = self._ticket(ticket_id, server.index, now)
            self.servers.take(server, ticket.ticket_id)
            self._out.append(IssueTicket(server.index, ticket))

    def _next_queued(self) -> bool:
        while self._queue and self._queue[0][3].state is not State.QUEUED:
            heapq.heappop(self._queue)
        return bool(self._queue)

    def _ticket(self, ticket_id: int, server: int, now: float) -> Ticket:
        sample = heapq.heappop(self._queue)[3]
        attempt = Attempt(ticket_id, sample, server, self.n, now)
        self.ledger.start(sample, attempt)
        self.hedging.issued(attempt)
        return self._training_ticket(attempt, now)

    def _hedge(self, now: float) -> None:
        """A second copy, elsewhere, for each episode that is slow, as far as there is credit that nothing new needs."""
        hedging, servers = self.hedging, self.servers
        if not hedging.quantile:
            return
        hedging.look(now)
        open_samples = self.ledger.samples[State.RUNNING] + self.ledger.samples[State.WAITING]
        for slow in hedging.waiting():
            server = servers.next(avoid=slow.server) if hedging.allows(open_samples) else None
            if server is None or self.n < self.floor:
                return
            attempt = Attempt(self._next_ticket, slow.sample, server.index, self.n, now)
            self._next_ticket += 1
            self.ledger.hedge(slow.sample, attempt)
            servers.take(server, attempt.ticket_id)
            hedging.live += 1
            self.stats.hedged += 1
            self._out.append(IssueTicket(server.index, self._training_ticket(attempt, now)))

    def _training_ticket(self, attempt: Attempt, now: float) -> Ticket:
        sample, settings = attempt.sample, self.settings
        group = sample.group
        self._overdue.append((now + settings.episode_deadline_s + BACKSTOP_S, attempt.ticket_id))
        return Ticket(
            ticket_id=attempt.ticket_id,
            sample_id=sample.sample_id,
            group_id=group.group_id,
            task_index=group.assignment.task_index,
            version=Version(self.epoch, self.n),
            attempt=sample.failures,
            deadline_s=settings.episode_deadline_s,
            seed=sample_seed(settings.seed, sample.sample_id),
            temperature=settings.temperature,
        )

    def _evaluation_ticket(self, ticket_id: int, server: int) -> Ticket:
        attempt = self.evaluations.start(ticket_id, server)
        return Ticket(
            ticket_id=ticket_id,
            sample_id=-1,
            group_id=-1,
            task_index=attempt.task_index,
            version=attempt.evaluation.version,
            attempt=attempt.failures,
            kind="eval",
            deadline_s=self.settings.episode_deadline_s,
            seed=sample_seed(self.settings.seed, -1 - attempt.task_index),
            temperature=self.settings.eval_temperature,
        )
