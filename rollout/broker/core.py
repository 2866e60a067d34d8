"""BrokerCore: who may run, what is fresh, what is trained. A pure state machine (docs/freshness.md has the rules).

Events are methods; each takes the caller's clock (`now`, seconds) and returns the actions to carry out,
in order. No sockets, no clock, no threads; the production shell, the tests and the virtual-time simulator drive
this same object.

    core = BrokerCore(Rules(steps=10, groups_per_batch=4, group_size=8, train_tasks=100))
    core.server_joined(0, 0, capacity=64, now=0.0)
    actions = core.published(Version(0, 0), now=0.0)      # the first version: IssueTicket(...) for F1's groups
    actions = core.batch_requested(0, now=0.1)            # nothing yet
    actions = core.finished(ticket_id, Outcome(...), now=1.0)  # ..., EmitBatch once B groups are in

n = published version = batches trained; e = the next step to be assembled (n <= e). The parts, and their rules:

* **F1** `Groups.admit`: `Rules.admitted(n)` whole groups.
* **F2** `Tickets.issue`: tickets carry the version at which they go out; none goes out while n < e - S.
* **F3** `Groups.set_version`, `Groups.cut_off`: an unbatched group with v < e - S fits no later batch and ends `stale`,
  its task in front again with attempts + 1. e >= n, so this is F3's bound n - S, applied as soon as it is certain (at
  assembly), not only at publication.
* **F4** `Batches.assemble`: B ready groups by (v, issue number), at the learner's request for step e.
* **F5** `Batches.is_held`: a batch waits for groups that were cut off P times, at most `hold_deadline_s` from when it
  had its B groups and was requested.

Every ticket ends once: finished, failed, cancelled, or by the death of its server. What is reported for a ticket
after its end is dropped, so a sample counts once whatever is sent again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

from rl.core.messages import Version
from rollout.broker import journal
from rollout.broker.actions import Action, Finished, Outcome, StopRun
from rollout.broker.batches import Batches
from rollout.broker.evaluation import Evaluations
from rollout.broker.groups import Groups
from rollout.broker.ledger import Ledger, LedgerError
from rollout.broker.policy import (
    EndGroup,
    Policy,
    Proposals,
    StartCopy,
    Suspend,
    hooks_of,
    make_policies,
    make_priority,
    make_task_source,
)
from rollout.broker.records import NAMES, Attempt, Phase, State
from rollout.broker.rules import Rules
from rollout.broker.servers import Servers
from rollout.broker.statistics import Statistics
from rollout.broker.tasks import TaskQueue, TaskSource
from rollout.broker.tickets import BACKSTOP_S, Tickets

P = ParamSpec("P")

_IN_FLIGHT = (State.QUEUED, State.RUNNING, State.WAITING, State.BATCHED)
_CUT_OFF = (State.STALE, State.REDUNDANT, State.FAILED)


class BrokerCore:
    """`tasks` and `ledger` replace the usual ones. Raises ConfigError for a name in the rules that does not exist."""

    def __init__(
        self,
        rules: Rules,
        *,
        tasks: TaskSource | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.rules = rules
        self.started = False
        self.stopped = False
        self.finished_at: float | None = None
        self._drain_since: float | None = None

        priority = make_priority(rules)
        source = tasks or make_task_source(rules)
        self.ledger = ledger or Ledger()
        self.servers = Servers()
        self.tickets = Tickets(rules, self.ledger, self.servers)
        self.groups = Groups(rules, self.tickets, TaskQueue(source), priority.issue)
        self.batches = Batches(rules, self.groups, priority.consume)
        self.evaluations = Evaluations(rules, self.tickets)
        self.policies = make_policies(self.groups)
        self._hooks = hooks_of(self.policies)

    # ------------------------------------------------------------ events: learner

    def published(self, version: Version, now: float) -> list[Action]:
        """Version n is loaded nowhere yet, but trained and on its way. The first one starts the epoch."""
        out: list[Action] = []
        if not self.started:
            if version.n != self.n:
                out += self._stop(f"the learner starts at version {version.n}, the broker at {self.n}")
            self.started = True
            self.tickets.begin(version.epoch)
        elif version.epoch != self.epoch:
            out += self._stop(f"the learner publishes in epoch {version.epoch}, this run is in epoch {self.epoch}")
        elif version.n == self.n + 1 and self.n in self.batches.untrained:
            out += self._trained(now)
        elif version.n > self.n:
            out += self._stop(f"the learner publishes version {version.n} after {self.n} without that batch")
        return self._turn(out, now)

    def batch_requested(self, step: int, now: float) -> list[Action]:
        self.batches.request(step, now)
        return self._turn([], now)

    def eval_requested(self, version: Version, tasks: int, now: float) -> list[Action]:
        self.evaluations.request(version, tasks, now)
        return self._turn([], now)

    # ------------------------------------------------------------ events: environment servers

    def server_joined(self, server: int, incarnation: int, capacity: int, now: float) -> list[Action]:
        """Idempotent; a newer incarnation replaces an older one whose death was not announced yet."""
        known = self.servers.by_index.get(server)
        if self.servers.is_dead(server, incarnation) or (known is not None and known.incarnation > incarnation):
            return []

        out: list[Action] = []
        if known is not None and known.incarnation < incarnation:
            out += self._lose_server(server, known.incarnation, now)
        if self.servers.join(server, incarnation, capacity):
            out += self._ask(Policy.server_joined, now, server, now)
        self.servers.offer(server)
        return self._turn(out, now)

    def server_left(self, server: int, incarnation: int, now: float) -> list[Action]:
        """The server is dead for certain: what it held is tried again."""
        return self._turn(self._lose_server(server, incarnation, now), now)

    def finished(self, ticket_id: int, outcome: Outcome, now: float) -> list[Action]:
        if ticket_id in self.evaluations.running:
            return self._turn(self._end_evaluation(ticket_id, outcome, now), now)
        attempt = self.ledger.attempts.get(ticket_id)
        if attempt is None or not attempt.live:
            self.stats.duplicates += 1
            return []

        self.groups.given_up = 0
        self.stats.issued.add(outcome)
        self._tell(Policy.finished, attempt, now)
        self.tickets.end(attempt, outcome.tokens_generated)
        if attempt.cut:  # it ended before the cancel reached it
            self.stats.cut_finished(attempt.cut, outcome)

        out: list[Action] = []
        sample = attempt.sample
        if sample.state is State.RUNNING and (sample.attempt is attempt or sample.spare is attempt):
            out += self._accept(attempt, outcome, now)
        return self._turn(out, now)

    def failed(self, ticket_id: int, reason: str, now: float, turns: int | None = None) -> list[Action]:
        """The environment server could not bring the episode to its end; `turns`: begun by then, None: unknown."""
        out: list[Action] = []
        attempt = self.evaluations.running.get(ticket_id) or self.ledger.live(ticket_id)
        if attempt is not None:
            out += self._ask(Policy.failed, now, attempt.server, now)
        return self._without_result(ticket_id, reason, now, turns, out)

    def cancelled(self, ticket_id: int, now: float, turns: int | None = None) -> list[Action]:
        """The answer to a cancel; of a ticket that was not cancelled it is a failure."""
        return self._without_result(ticket_id, "cancelled by its environment server", now, turns, [])

    # ------------------------------------------------------------ events: proxy and clock

    def first_token(self, ticket_id: int, version: Version, now: float) -> list[Action]:
        """The first token of an episode was sampled by `version`; it may expire the group at once (F3)."""
        attempt = self.ledger.attempts.get(ticket_id)
        if attempt is None or attempt.sample.state is not State.RUNNING:
            return []
        sample, group = attempt.sample, attempt.sample.group
        if attempt is not sample.attempt and attempt is not sample.spare:
            return []

        out: list[Action] = []
        is_current = attempt is sample.attempt
        if is_current and version.epoch != self.epoch:
            self.stats.other_epoch += 1
            out += self.groups.end(group, State.STALE, now)
        elif attempt.version is None or version.n < attempt.version:
            attempt.version = version.n
            if is_current and (group.version is None or version.n < group.version):
                out += self.groups.set_version(group, version.n, now)
        return self._turn(out, now) if is_current else []

    def usage(self, ticket_id: int, tokens: int, lost: bool, now: float) -> list[Action]:
        """Tokens that a generator sampled for a training ticket; of evaluations nothing is counted."""
        attempt = self.ledger.attempts.get(ticket_id)
        if attempt is not None or ticket_id not in self.evaluations.issued:
            self.ledger.usage(ticket_id, tokens, lost)
            if attempt is not None and attempt.cut and not attempt.live and attempt.claimed < 0 and not lost:
                self.stats.cut_late(attempt.cut, tokens)
        return self._turn([], now) if self._drain_since is not None else []

    def tick(self, now: float) -> list[Action]:
        """Deadlines; due at `next_deadline()`, harmless at any other time."""
        out: list[Action] = []
        for attempt in self.tickets.overdue(now):
            if attempt is attempt.sample.attempt:
                self.tickets.revoke(attempt, State.FAILED)
                out += self._ask(Policy.failed, now, attempt.server, now)
            out += self._retry(attempt, f"no end {BACKSTOP_S:g} s after its deadline", now)
        return self._turn(out, now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do, as far as is known now."""
        due = [self.tickets.next_deadline()]
        if self.batches.held_since is not None:
            due.append(self.batches.held_since + self.rules.hold_deadline_s)
        if self._drain_since is not None and self.finished_at is None:
            due.append(self._drain_since + self.rules.drain_deadline_s)
        if self.started and not self.stopped:
            due += [policy.next_deadline() for policy in self.policies]
        return min((each for each in due if each is not None), default=None)

    # ------------------------------------------------------------ one turn

    def _turn(self, out: list[Action], now: float) -> list[Action]:
        """After every event: assemble what is due, admit, issue, and see whether this is the end."""
        if self.started and not self.stopped:
            out += self._ask(Policy.turn_begins, now, now)
            while (
                self.batches.is_complete()
                and all(may() for may in self._hooks[Policy.may_assemble])
                and not self.batches.is_held(now)
            ):
                out += self._assemble(now)

            room = len(self.groups.open) < self.groups.limit and self.groups.e < self.rules.steps
            if room and all(may() for may in self._hooks[Policy.may_admit]):
                self.groups.admit(now)

            if self.evaluations.queue:
                out += self.evaluations.issue()
            issued = self.tickets.issue(self.n, self.groups.floor, now)
            out += issued
            for action in issued:
                self._tell(Policy.issued, self.ledger.attempts[action.ticket.ticket_id])
            out += self._ask(Policy.turn_ends, now, now)

            if self.n == self.rules.steps:
                out += self._drain(now)
        out += self.tickets.revocations()
        return out

    # ------------------------------------------------------------ policies

    def _tell(self, hook: Callable[Concatenate[Any, P], None], *what: P.args, **named: P.kwargs) -> None:
        for each in self._hooks[hook]:
            each(*what)

    def _ask(
        self, hook: Callable[Concatenate[Any, P], Proposals], now: float, *what: P.args, **named: P.kwargs
    ) -> list[Action]:
        """Carry out what the policies propose."""
        out: list[Action] = []
        for each in self._hooks[hook]:
            for proposal in each(*what):
                match proposal:
                    case EndGroup(group, end, put_back):
                        out += self.groups.end(group, end, now, put_back=put_back)
                    case StartCopy(attempt):
                        ticket = self.tickets.copy(attempt, self.n, self.groups.floor, now)
                        if ticket is not None:
                            self.stats.hedged += 1
                            out.append(ticket)
                    case Suspend(server, suspended):
                        self.servers.suspend(server, suspended)
        return out

    # ------------------------------------------------------------ ends of tickets

    def _accept(self, attempt: Attempt, outcome: Outcome, now: float) -> list[Action]:
        """The first result of a sample, which may complete its group."""
        group = attempt.sample.group
        if outcome.epoch != self.epoch:
            self.stats.other_epoch += 1
            return [*self.groups.end(group, State.STALE, now)]

        self.stats.hedges_won += attempt.spare
        self.tickets.settle(attempt)
        out: list[Action] = [*self.groups.accept(attempt, outcome, now)]
        if group.done == self.rules.group_size and group.phase is Phase.OPEN:
            out += self._ask(Policy.completed, now, group)
            if group.phase is Phase.OPEN:
                self.batches.add(group)
        return out

    def _without_result(
        self, ticket_id: int, reason: str, now: float, turns: int | None, out: list[Action]
    ) -> list[Action]:
        if ticket_id in self.evaluations.running:
            return self._turn(out + self._end_evaluation(ticket_id, None, now), now)
        attempt = self.ledger.live(ticket_id)
        if attempt is None:
            return []
        return self._turn(out + self._end_attempt(attempt, reason, now, turns), now)

    def _end_attempt(self, attempt: Attempt, reason: str, now: float, turns: int | None = None) -> list[Action]:
        self.tickets.end(attempt)
        self.stats.cut_running(attempt, turns, now)
        return self._retry(attempt, reason, now)

    def _retry(self, attempt: Attempt, reason: str, now: float) -> list[Action]:
        out: list[Action] = [*self.groups.retry(attempt, now)]
        if out and self.groups.given_up >= self.rules.max_groups_given_up:
            out += self._stop(f"{self.groups.given_up} groups in a row failed every attempt; the last one: {reason}")
        return out

    def _end_evaluation(self, ticket_id: int, outcome: Outcome | None, now: float) -> list[Action]:
        report = self.evaluations.end(ticket_id, outcome, now)
        if report is None:
            return []
        self.stats.evaluated(report)
        return [report]

    def _lose_server(self, server: int, incarnation: int, now: float) -> list[Action]:
        held = self.servers.leave(server, incarnation)
        if held is None:
            return []
        self._tell(Policy.server_left, server, bool(held))

        out: list[Action] = []
        for ticket_id in held:
            if ticket_id in self.evaluations.running:
                out += self._end_evaluation(ticket_id, None, now)
            else:
                attempt = self.ledger.attempts[ticket_id]
                out += self._end_attempt(attempt, f"environment server {server} died", now)
        return out

    # ------------------------------------------------------------ batches

    def _assemble(self, now: float) -> list[Action]:
        batch = self.batches.assemble(now)
        self.stats.assembled(batch.step, batch.samples, self.rules.staleness_bound)
        batch.metrics.update(self._metrics())

        out: list[Action] = [batch, *self.groups.cut_off(now)]
        return out + self._ask(Policy.assembled, now)

    def _trained(self, now: float) -> list[Action]:
        groups = self.batches.untrained.pop(self.n)
        self.stats.trained(self.n, groups)
        self.groups.stand_at(self.n + 1, self.groups.e)
        return [record for group in groups for record in self.groups.end(group, State.TRAINED, now)]

    # ------------------------------------------------------------ the end

    def _drain(self, now: float) -> list[Action]:
        """All steps are trained: the end comes with the last evaluation, ticket and usage, or by the deadline."""
        awaited = self.rules.eval_tasks > 0 and self.rules.steps not in self.evaluations.requested
        if self.finished_at is not None or awaited or self.evaluations.pending:
            return []

        if self._drain_since is None:
            self._drain_since = now
        settled = not self.servers.outstanding and not self.ledger.unreconciled
        if not settled and now < self._drain_since + self.rules.drain_deadline_s:
            return []

        self.finished_at = now
        self.ledger.give_up_waiting()
        out: list[Action] = [Finished(self.report())]
        books = self.ledger
        if books.mismatches:
            out += self._stop(f"the ledger does not close ({books.mismatches} times): {books.first_mismatch}")
        try:
            books.check()
        except LedgerError as error:
            out += self._stop(f"the ledger does not close: {error}")
        return out

    def _stop(self, reason: str) -> list[Action]:
        """The run cannot go on; only the first reason is told."""
        if self.stopped:
            return []
        self.stopped = True
        return [StopRun(reason)]

    # ------------------------------------------------------------ what can be seen from outside

    @property
    def n(self) -> int:
        return self.groups.n

    @property
    def stats(self) -> Statistics:
        return self.groups.stats

    @property
    def epoch(self) -> int:
        return self.tickets.epoch

    def snapshot(self) -> dict[str, Any]:
        """Plain data for a checkpoint at version n (`journal.py`)."""
        return journal.snapshot(self.groups)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a snapshot; only a core that has seen no event may do so."""
        journal.restore(self.groups, state)

    def _counts(self) -> dict[str, int]:
        """What policies did; 0 where one is off."""
        counts = {"hedged_episodes": self.stats.hedged, "quarantines": 0, "filtered_groups": 0}
        for policy in self.policies:
            counts |= policy.counts()
        return counts

    def _metrics(self) -> dict[str, float]:
        samples = self.ledger.samples
        queue = {f"queue/{NAMES[state]}": samples[state] for state in _IN_FLIGHT}
        ends = {f"broker/{NAMES[state]}_samples": samples[state] for state in _CUT_OFF}
        counts = {f"broker/{name}": count for name, count in self._counts().items()}
        return {name: float(value) for name, value in (queue | ends | counts).items()}

    def report(self) -> dict[str, Any]:
        """The closing report (`Statistics.report`), at any time."""
        return self.stats.report(self.n, self.ledger) | {"quarantines": self._counts()["quarantines"]}

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
