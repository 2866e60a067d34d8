"""BrokerCore: who may run, what is fresh, what is trained. A pure state machine (docs/freshness.md has the rules).

Events are methods; each takes the caller's clock (`now`, seconds) and returns the actions to carry out,
in order. No sockets, no clock, no threads; the production shell, the tests and the virtual-time simulator drive
this same object.

    core = BrokerCore(Rules(steps=10, groups_per_batch=4, group_size=8, train_tasks=100))
    core.server_joined(0, 0, capacity=64, now=0.0)
    actions = core.published(Version(0, 0), now=0.0)      # the first version: IssueTicket(...) for F1's groups
    actions = core.batch_requested(0, now=0.1)            # nothing yet
    actions = core.finished(ticket_id, EpisodeOutcome(...), now=1.0)  # ..., EmitBatch once B groups are in

n = published version = batches trained; e = the next step to be assembled (n <= e). The parts, and their rules:

* **F1** `Groups.admit`: `Rules.admitted(n)` whole groups.
* **F2** `Tickets.issue`: tickets carry the version at which they go out; none goes out while n < e - S.
* **F3** `Groups.set_version`, `Groups.cut_off`: an unbatched group with v < e - S fits no later batch and ends `stale`.
  Its task goes in front again with one more cut-off. As e >= n, this is F3's bound n - S, applied as soon as it is
  certain (at assembly), not only at publication.
* **F4** `Batches.assemble`: B ready groups, by v, at the learner's request for step e.
* **F5** `Batches.is_held`: a batch waits for groups that were cut off P times, at most `hold_deadline_s` from when it
  had its B groups and was requested.

Every ticket ends once: finished, failed, cancelled, or by the death of its server. What is reported for a ticket
after its end is dropped, so a sample counts once whatever is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from rl.config.hooks import make_hooks
from rl.wire.messages import Ticket, Version
from rollout.broker.actions import Action, EpisodeOutcome, Finished, IssueTicket, RevokeTickets, StopRun
from rollout.broker.batches import Batches
from rollout.broker.built_in_hooks import ConstantGroups
from rollout.broker.deadlines import BACKSTOP_S
from rollout.broker.evaluation import Ending, EvalAttempt, Evaluations
from rollout.broker.groups import Groups
from rollout.broker.history import History, restore, snapshot
from rollout.broker.hooks import BrokerHook, BrokerHooks, EndGroup, Proposals, StartCopy, Suspend
from rollout.broker.ledger import Ledger, LedgerError
from rollout.broker.records import Attempt, Phase, State
from rollout.broker.rules import Rules
from rollout.broker.servers import Server, Servers
from rollout.broker.statistics import Statistics, state_metrics
from rollout.broker.tasks import TaskQueue, TaskSource, make_priority, make_task_source
from rollout.broker.tickets import Tickets


class BrokerCore:
    """`tasks` and `ledger` replace the usual ones. Raises ConfigError for a name in the rules that does not exist."""

    def __init__(
        self,
        rules: Rules,
        *,
        tasks: TaskSource | None = None,
        ledger: Ledger | None = None,
        data: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """data: what the tasks are, by environment (`envs/data.py`); empty: unknown."""
        self.rules = rules
        self.stopped = False
        self._out: list[Action] = []  # what this event led to so far

        self.priority = priority = make_priority(rules)
        self.ledger = ledger or Ledger()
        self.servers = Servers()
        self.tickets = Tickets(rules, self.ledger, self.servers)
        self.copies = Copies(self.tickets)
        queue = TaskQueue(tasks or make_task_source(rules), data)
        self.groups = Groups(rules, self.tickets, queue, priority.issue)
        self.batches = Batches(rules, self.groups, priority.consume)
        self.evaluations = Evaluations(self.groups)
        self.history = History(self.batches, self.evaluations)
        self.ending = Ending(self.evaluations)

        self.filtering = ConstantGroups(self.groups)
        filters = [self.filtering] if rules.filter_constant_groups and rules.group_size > 1 else []
        self.hooks = BrokerHooks([*filters, *make_hooks("broker", rules.hooks, self.groups)])

    @property
    def n(self) -> int:
        return self.groups.n

    @property
    def timeline(self) -> int:
        """-1 before the first version."""
        return self.tickets.timeline

    @property
    def stats(self) -> Statistics:
        return self.groups.stats

    # ------------------------------------------------------------ events: learner

    def published(self, version: Version, now: float) -> list[Action]:
        """Version n is loaded nowhere yet, but trained and on its way. The first one starts the timeline."""
        if self.timeline < 0:
            if version.n != self.n:
                self._stop(f"the learner starts at version {version.n}, the broker at {self.n}")
            self.tickets.begin(version.timeline)
            self.groups.run.begin(version.n, now)

        elif version.timeline < self.timeline:
            self._stop(f"the learner publishes in timeline {version.timeline}, this run is in timeline {self.timeline}")
        else:
            if version.n == self.n + 1 and self.n in self.batches.untrained:
                self._out += self.history.trained(now)
            if version.n > self.n:
                self._stop(f"the learner publishes version {version.n} after {self.n} without that batch")
            elif version.timeline > self.timeline and (self.ending.has_come or version.n < self.history.since):
                self._stop(f"the learner came back with another version {version.n}, which cannot be taken back now")
            elif version.timeline > self.timeline:
                self._out += self.history.roll_back(version, now)
        return self._after_event(now)

    def batch_requested(self, step: int, now: float) -> list[Action]:
        """The learner wants batch `step`; it may ask for the next one while it trains (prefetch)."""
        self.batches.request(step, now)
        return self._after_event(now)

    def eval_requested(self, version: Version, tasks: int, now: float) -> list[Action]:
        self.evaluations.request(version, tasks, now)
        return self._after_event(now)

    # ------------------------------------------------------------ events: environment servers

    def server_joined(
        self, server: int, incarnation: int, capacity: int, now: float, held: Collection[int] = ()
    ) -> list[Action]:
        """Idempotent; a newer incarnation replaces an older one whose death was not announced yet.

        held: its tickets. After the death of the broker's process others may never have arrived, and go out again.
        """
        known = self.servers.by_index.get(server)
        if self.servers.is_dead(server, incarnation) or (known is not None and known.incarnation > incarnation):
            return []

        if known is not None and known.incarnation < incarnation:
            self._lose_server(server, known.incarnation, now)
        if self.servers.join(server, incarnation, capacity):
            self._ask(BrokerHook.server_joined, now, server)
        self._out += compare_tickets(self.servers.by_index[server], held, self._attempt)
        self.servers.offer(server)
        return self._after_event(now)

    def server_left(self, server: int, incarnation: int, now: float) -> list[Action]:
        """The server is dead for certain: what it held is tried again."""
        self._lose_server(server, incarnation, now)
        return self._after_event(now)

    def finished(self, ticket_id: int, outcome: EpisodeOutcome, now: float) -> list[Action]:
        if ticket_id in self.evaluations.running:
            self._out += self.evaluations.end(ticket_id, outcome, now)
            return self._after_event(now)
        attempt = self.ledger.live(ticket_id)
        if attempt is None:
            self.stats.duplicates += 1
            return []

        self.groups.given_up = 0
        self.stats.issued.add(outcome)
        if self.hooks:
            self._ask(BrokerHook.finished, now, attempt)
        self.tickets.end(attempt, outcome.tokens_generated)
        if attempt.cut:  # it ended before the cancel reached it
            self.stats.cut_finished(attempt.cut, outcome)
        if attempt.is_running:
            self._accept(attempt, outcome, now)
        return self._after_event(now)

    def failed(self, ticket_id: int, reason: str, now: float, turns: int | None = None) -> list[Action]:
        """The environment server could not bring the episode to its end; `turns`: begun by then, None: unknown."""
        if (attempt := self._attempt(ticket_id)) is not None:
            self._ask(BrokerHook.failed, now, attempt.server)
        return self._after_event(now) if self._end_without_result(ticket_id, reason, now, turns) else []

    def refused(self, ticket_id: int, reason: str, now: float) -> list[Action]:
        """A ticket's trajectory cannot be true (`validation.fault`): the ticket has failed."""
        if self.ticket(ticket_id) is None:
            self.stats.duplicates += 1
            return []
        self.stats.refused_trajectories += 1
        return self.failed(ticket_id, f"invalid trajectory: {reason}", now)

    def cancelled(self, ticket_id: int, now: float, turns: int | None = None) -> list[Action]:
        """The answer to a cancel; of a ticket that was not cancelled it is a failure."""
        ended = self._end_without_result(ticket_id, "cancelled by its environment server", now, turns)
        return self._after_event(now) if ended else []

    # ------------------------------------------------------------ events: proxy and clock

    def first_token(self, ticket_id: int, version: Version, now: float) -> list[Action]:
        """The first token of an episode was sampled by `version`; it may expire the group at once (F3)."""
        attempt = self.ledger.attempts.get(ticket_id)
        if attempt is None or not attempt.is_running:
            return []

        is_current = attempt is attempt.sample.attempt
        if is_current and version.timeline != self.timeline:
            self.stats.other_timeline += 1
            self._out += self.groups.end(attempt.sample.group, State.STALE, now)
        else:
            self._out += self.groups.sampled_first_token(attempt, version.n, now)
        return self._after_event(now) if is_current else []

    def usage(self, ticket_id: int, tokens: int, lost: bool, now: float) -> list[Action]:
        """Tokens that a generator sampled for a training ticket; of evaluations nothing is counted."""
        attempt = self.ledger.attempts.get(ticket_id)
        if attempt is not None or ticket_id not in self.evaluations.issued:
            self.ledger.usage(ticket_id, tokens, lost)
        if attempt is not None and attempt.cut and not attempt.live and attempt.claimed < 0 and not lost:
            self.stats.cut_late(attempt.cut, tokens)
        return self._after_event(now) if self.ending.since is not None else []

    def tick(self, now: float) -> list[Action]:
        """Deadlines; due at `next_deadline()`, harmless at any other time."""
        for attempt in self.tickets.deadlines.overdue(now):
            if attempt is attempt.sample.attempt:
                self.tickets.revoke(attempt, State.FAILED)
                self._ask(BrokerHook.failed, now, attempt.server)
            self._retry(attempt, f"no end {BACKSTOP_S:g} s after its deadline", now)
        return self._after_event(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, as far as is known now."""
        due = [self.tickets.deadlines.next(), self.ending.next_deadline()]
        if self.batches.held_since is not None:
            due.append(self.batches.held_since + self.rules.hold_deadline_s)
        if self.timeline >= 0 and not self.stopped:
            due += self.hooks.deadlines()
        return min((each for each in due if each is not None), default=None)

    # ------------------------------------------------------------ after every event

    def _after_event(self, now: float) -> list[Action]:
        """Assemble what is due, admit, issue, and see whether this is the end."""
        groups = self.groups
        if self.tickets.timeline >= 0 and not self.stopped:
            if self.hooks:
                self._ask(BrokerHook.event_begins, now)
            while (
                self.batches.is_complete()
                and self.hooks.allow(BrokerHook.may_assemble)
                and not self.batches.is_held(now)
            ):
                self._assemble(now)

            if (
                len(groups.open) < groups.limit
                and groups.e < groups.run.steps
                and self.hooks.allow(BrokerHook.may_admit)
            ):
                groups.admit(now)

            if self.evaluations.queue:
                self._out += self.evaluations.issue()
            issued = self.tickets.issue(groups.n, groups.oldest_useful, now)
            self._out += issued
            if self.hooks:
                for action in issued:
                    self._ask(BrokerHook.issued, now, self.ledger.attempts[action.ticket.ticket_id])
                self._ask(BrokerHook.event_ends, now)

            if groups.n == groups.run.steps and self.ending.comes(now):
                self._close()

        self._out += self.servers.revocations()
        out, self._out = self._out, []
        return out

    def _assemble(self, now: float) -> None:
        batch = self.batches.assemble(now)
        self.stats.assembled(batch, self.rules.staleness_bound)
        counts = {"hedged_episodes": self.stats.hedged, **self.filtering.in_step(), **self.hooks.counts()}
        batch.metrics.update(state_metrics(self.ledger, counts))
        self._out += [batch, *self.groups.cut_off(now)]
        self._ask(BrokerHook.assembled, now)

    def _ask(self, method: Callable[..., Proposals], now: float, *what: object) -> None:
        """Tell the hooks what happens, and carry out what they propose."""
        for proposal in self.hooks.propose(method, now, *what):
            match proposal:
                case EndGroup(group, end):
                    self._out += self.groups.end(group, end, now)
                case Suspend(server, suspended):
                    self.servers.suspend(server, suspended)
                case StartCopy(attempt):
                    copies = self.copies.start(attempt, self.n, self.groups.oldest_useful, now)
                    self.stats.hedged += len(copies)
                    self._out += copies

    # ------------------------------------------------------------ ends of tickets

    def _accept(self, attempt: Attempt, outcome: EpisodeOutcome, now: float) -> None:
        """The first result of a sample, which may complete its group."""
        group = attempt.sample.group
        if outcome.timeline != self.timeline:
            self.stats.other_timeline += 1
            self._out += self.groups.end(group, State.STALE, now)
            return

        self.stats.hedges_won += attempt.spare
        self.copies.settle(attempt)
        self._out += self.groups.accept(attempt, outcome, now)
        is_whole = group.done == self.groups.size
        if group.phase is Phase.UNFINISHED and (is_whole or self.groups.first.have_answered(group)):
            self._ask(BrokerHook.completed, now, group)
            if group.phase is Phase.UNFINISHED:
                self.batches.add(group) if is_whole else self.groups.first.widen(group)

    def _end_without_result(self, ticket_id: int, reason: str, now: float, turns: int | None = None) -> bool:
        """End an attempt; False if it had ended before."""
        if ticket_id in self.evaluations.running:
            self._out += self.evaluations.end(ticket_id, None, now)
            return True
        attempt = self.ledger.live(ticket_id)
        if attempt is None:
            return False

        self.tickets.end(attempt)
        self.stats.cut_running(attempt, turns, now)
        self._retry(attempt, reason, now)
        return True

    def _retry(self, attempt: Attempt, reason: str, now: float) -> None:
        attempt.failure = reason
        if self.copies.go_on(attempt):
            group = attempt.sample.group
            self._out += self.groups.set_version(group, group.live_version(), now)
            return

        self._out += self.groups.retry(attempt, now)
        count = self.groups.given_up
        if count >= self.rules.max_groups_given_up:
            self._stop(f"{count} groups in a row failed every attempt; the last one: {reason}")

    def _lose_server(self, server: int, incarnation: int, now: float) -> None:
        held = self.servers.leave(server, incarnation)
        if held is not None:
            self._ask(BrokerHook.server_left, now, server, bool(held))
            for ticket_id in held:
                self._end_without_result(ticket_id, f"environment server {server} died", now)

    # ------------------------------------------------------------ the end

    def _close(self) -> None:
        self.ledger.give_up_waiting()
        self._out.append(Finished(self.report()))
        if self.ledger.mismatches:
            what = f"({self.ledger.mismatches} times): {self.ledger.first_mismatch}"
            self._stop(f"the ledger does not close {what}")
        try:
            self.ledger.check()
        except LedgerError as error:
            self._stop(f"the ledger does not close: {error}")

    def _stop(self, reason: str) -> None:
        """The run cannot go on; only the first reason is told."""
        if not self.stopped:
            self._out.append(StopRun(reason))
        self.stopped = True

    # ------------------------------------------------------------ what can be seen from outside

    def ticket(self, ticket_id: int) -> Ticket | None:
        """The live ticket of this id."""
        attempt = self._attempt(ticket_id)
        return attempt.ticket if attempt is not None else None

    def _attempt(self, ticket_id: int) -> Attempt | EvalAttempt | None:
        return self.evaluations.running.get(ticket_id) or self.ledger.live(ticket_id)

    def snapshot(self) -> dict[str, Any]:
        """Plain data for a checkpoint at version n (`history.py`)."""
        return snapshot(self.groups)

    def restore(self, state: dict[str, Any], new_data: bool = False) -> None:
        """Continue from a snapshot; only a core that has seen no event may do so. new_data: it may be of other data."""
        restore(self.groups, state, new_data)

    def report(self) -> dict[str, Any]:
        """The closing report (`Statistics.report`), at any time."""
        return self.stats.report(self.n, self.ledger) | {"hooks": self.hooks.counts()}

    def describe(self) -> dict[str, Any]:
        """The state in numbers, for whoever must find out who waits for whom."""
        return {
            "version": self.n,
            "next_step": self.groups.e,
            "requested": sorted(self.batches.requested),
            "groups": len(self.groups.open),
            "ready_groups": self.groups.ready,
            "groups_per_batch": self.rules.groups_per_batch,
            "held_for": self.groups.held_for(),
            "queued_evaluations": len(self.evaluations.queue),
            "running_evaluations": len(self.evaluations.running),
            "servers": {s.index: f"{len(s.live)}/{s.capacity}" for s in self.servers.by_index.values()},
            "ledger": self.ledger.report(),
        }


def compare_tickets(
    server: Server, held: Collection[int], find: Callable[[int], Attempt | EvalAttempt | None]
) -> list[Action]:
    """What an environment server should have, against what it has: tickets on their way to it are lost with a broker.

    What has not arrived goes out again; what nobody waits for is revoked, and ends by the server's word.
    """
    actions: list[Action] = []
    for ticket_id in sorted(server.live.difference(held)):
        if (attempt := find(ticket_id)) is not None and attempt.ticket is not None:
            actions.append(IssueTicket(server.index, attempt.ticket))

    unwanted = [
        ticket_id
        for ticket_id in sorted(server.live.union(held))
        if (attempt := find(ticket_id)) is None or not attempt.is_running
    ]
    if unwanted:
        actions.append(RevokeTickets(server.index, unwanted))
    return actions


class Copies:
    """Second copies of running samples, which a hook may ask for: a ticket more, with the same seed, on another server.

    The first to finish counts and the other is revoked. When one fails the other goes on.
    """

    def __init__(self, tickets: Tickets) -> None:
        self.tickets = tickets
        self.ledger = tickets.ledger

    def start(self, slow: Attempt, n: int, oldest_useful: int, now: float) -> list[IssueTicket]:
        """Start a copy of a running sample on another server, if one has a free seat (F2 as for any ticket)."""
        server = self.tickets.servers.next(avoid=slow.server)
        if server is None or n < oldest_useful:
            return []
        return [self.tickets.start(slow.sample, server, n, now)]

    def settle(self, attempt: Attempt) -> None:
        """Note that the attempt's sample has its result."""
        sample = attempt.sample
        other = sample.attempt if attempt is sample.spare else sample.spare
        if attempt is sample.spare:
            self.ledger.promote(sample)
        if other is not None and other.live:
            self.tickets.revoke(other, State.REDUNDANT)

    def go_on(self, attempt: Attempt) -> bool:
        """Whether, after this attempt has failed or is overdue, the other copy of its sample goes on."""
        sample = attempt.sample
        if not attempt.is_running or sample.spare is None:
            return False

        if attempt is sample.spare:
            if attempt.live:
                self.tickets.revoke(attempt, State.REDUNDANT)
            self.ledger.drop_spare(sample)
        else:
            self.ledger.supersede(sample)
            sample.failures += 1
            self.ledger.promote(sample)
        return True
