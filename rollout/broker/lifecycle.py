"""What happens to a group between its admission and its end: results, retries, expiry, assembly, training.

The state of the core and its internal steps. `core.py` turns events into calls of these and states the rules.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from msgspec.structs import replace

from rollout.broker.actions import Action, BatchSample, EmitBatch, Finished, GroupRecord, Outcome, StopRun
from rollout.broker.curricula import load_curriculum
from rollout.broker.evaluation import Evaluations
from rollout.broker.groups import GroupBook
from rollout.broker.hedging import Hedging
from rollout.broker.ledger import Ledger, LedgerError
from rollout.broker.priorities import Priority, load_priority
from rollout.broker.records import ENDS, NAMES, Attempt, Group, Phase, Sample, State
from rollout.broker.rules import Rules
from rollout.broker.servers import Servers
from rollout.broker.statistics import Statistics, batch_metrics, sample_version
from rollout.broker.tasks import TaskQueue, TaskSource


class Lifecycle:
    """`priority` and `tasks` replace those that the settings name (whose names may raise ConfigError).

    `audit` keeps every sample for `ledger.check()` (tests).
    """

    def __init__(
        self,
        settings: Rules,
        *,
        tasks: TaskSource | None = None,
        priority: Priority | None = None,
        audit: bool = False,
    ) -> None:
        self.settings = settings
        self._bound = settings.staleness_bound  # S
        self.epoch = -1
        self.e = 0  # next step to be assembled
        self.advance(0)
        self.started = False
        self.stopped = False
        self.finished_at: float | None = None
        self.ledger = Ledger(audit=audit)
        self.servers = Servers(settings.quarantine_failures, settings.quarantine_s)
        self.priority = priority or load_priority(settings.priority)
        self.book = GroupBook(settings.hold_patience, self.priority.consume)
        self.hedging = Hedging(settings.hedge_quantile)
        self.evaluations = Evaluations(settings.max_attempts)
        self.stats = Statistics()
        self.tasks = TaskQueue(
            tasks
            or load_curriculum(settings.curriculum, settings.seed, settings.train_tasks, settings.curriculum_options)
        )
        self.groups: dict[int, Group] = {}  # open, ready or batched: what F1 bounds
        self.batches: dict[int, tuple[list[Group], list[BatchSample]]] = {}  # by step: emitted, not trained yet
        self.requested: dict[int, float] = {}  # step -> when the learner asked
        self._queue: list[tuple[bool, float, int, Sample]] = []  # heap of (first attempt?, rank, sample id)
        self._overdue: deque[tuple[float, int]] = deque()  # (deadline, ticket), in order
        self._next_ticket = 0
        self._filtered = 0  # groups dropped in the current step
        self._given_up = 0  # groups in a row
        self._hold_since: float | None = None
        self._drain_since: float | None = None
        self._cancels: dict[int, list[int]] = {}
        self._out: list[Action] = []

    def advance(self, version: int) -> None:
        """The published version n is now `version`."""
        self.n = version
        self.limit = self.settings.admitted(version)  # F1

    @property
    def floor(self) -> int:
        """e - S: an unbatched group with a smaller v fits no later batch."""
        return self.e - self._bound

    # ------------------------------------------------------------ tickets

    def _enqueue(self, sample: Sample) -> None:
        first = sample.failures == 0
        heapq.heappush(self._queue, (first, sample.group.rank, sample.sample_id, sample))

    def _cancel(self, attempt: Attempt, end: State) -> None:
        attempt.cut = NAMES[end]
        self._cancels.setdefault(attempt.server, []).append(attempt.ticket_id)

    def _end_ticket(self, attempt: Attempt, claimed: int = -1) -> None:
        self.ledger.end(attempt, claimed)
        self.servers.give_back(attempt.server, attempt.ticket_id)

    def _lose_server(self, server: int, incarnation: int, now: float) -> None:
        for ticket_id in self.servers.leave(server, incarnation):
            if ticket_id in self.evaluations.running:
                self._end_evaluation(ticket_id, None, now)
            else:
                attempt = self.ledger.attempts[ticket_id]
                self._end_ticket(attempt)
                self.stats.cut_running(attempt, None, now)
                self._retry(attempt, f"environment server {server} died", now)

    def _end_evaluation(self, ticket_id: int, outcome: Outcome | None, now: float) -> None:
        self.servers.give_back(self.evaluations.running[ticket_id].server, ticket_id)
        if outcome is not None and outcome.epoch != self.epoch:
            outcome = None  # answered by weights of another epoch
        report = self.evaluations.end(ticket_id, outcome, now)
        if report is not None:
            self.stats.evaluated(report)
            self._out.append(report)

    # ------------------------------------------------------------ second copies of slow episodes

    def _win(self, sample: Sample, attempt: Attempt) -> None:
        """One of two copies has finished: the other one is cancelled."""
        if sample.hedge is None:
            return
        if attempt is sample.hedge:
            loser = sample.attempt
            assert loser is not None
            self.ledger.promote(sample)
            self.hedging.live -= 1
            self.stats.hedges_won += 1
            self._cancel(loser, State.REDUNDANT)
        else:
            self._drop_hedge(sample)

    def _drop_hedge(self, sample: Sample) -> None:
        hedge = sample.hedge
        if hedge is not None:
            if hedge.live:
                self._cancel(hedge, State.REDUNDANT)
            self.hedging.live -= 1
            sample.hedge = None

    # ------------------------------------------------------------ results

    def _accept(self, sample: Sample, attempt: Attempt, outcome: Outcome, now: float) -> None:
        """The first result of a sample: waits for its group's others."""
        group = sample.group
        if outcome.first_version >= 0:
            sample.version = outcome.first_version
        elif sample.version is None:
            sample.version = attempt.stamp  # nothing was generated
        sample.outcome = outcome
        self.ledger.move(sample, State.WAITING)
        group.done += 1
        if group.done == self.settings.group_size:
            for member in group.members:
                if member.state is State.QUEUED or member.state is State.RUNNING:
                    self._end_sample(member, State.REDUNDANT)
        if self._age(group, group.live_version(), now) and group.done == self.settings.group_size:
            self._complete(group, now)

    def _complete(self, group: Group, now: float) -> None:
        settings = self.settings
        rewards = [member.outcome.reward for member in group.members if member.outcome is not None]
        if (
            settings.filter_constant_groups
            and settings.group_size > 1
            and min(rewards) == max(rewards)
            and self._filtered < settings.max_filtered_per_step
        ):
            self._filtered += 1
            self._end_group(group, State.FILTERED, now)
        else:
            self.book.set_ready(group)

    def _retry(self, attempt: Attempt, reason: str, now: float) -> None:
        """An attempt has failed. With a second copy the sample runs on, else it is tried again up to its limit."""
        sample, group = attempt.sample, attempt.sample.group
        if sample.state is not State.RUNNING:
            return
        if sample.hedge is attempt:
            self._drop_hedge(sample)
            return
        if sample.attempt is not attempt:
            return
        self.ledger.supersede(sample)
        sample.failures += 1
        if sample.hedge is not None:
            self.ledger.promote(sample)
            self.hedging.live -= 1
        elif sample.failures < self.settings.max_attempts:
            self.ledger.move(sample, State.QUEUED)
            self._enqueue(sample)
        else:
            self.ledger.move(sample, State.FAILED)
            group.alive -= 1
        if group.alive >= self.settings.group_size:
            self._age(group, group.live_version(), now)
            return
        self._end_group(group, State.FAILED, now)
        self._given_up += 1
        if self._given_up >= self.settings.max_groups_given_up:
            self._stop(f"{self._given_up} groups in a row failed every attempt; the last one: {reason}")

    # ------------------------------------------------------------ groups

    def _age(self, group: Group, version: int | None, now: float) -> bool:
        """v(group) is now `version`; False if that expired the group."""
        self.book.set_version(group, version)
        if version is not None and version < self.floor:
            self._end_group(group, State.STALE, now)
            return False
        return True

    def _end_sample(self, sample: Sample, state: State) -> None:
        if sample.state is State.RUNNING and sample.attempt is not None:
            self._drop_hedge(sample)
            self._cancel(sample.attempt, state)
        elif sample.outcome is not None and state is not State.TRAINED:
            self.stats.cut_finished(NAMES[state], sample.outcome)
        self.ledger.move(sample, state)

    def _end_group(self, group: Group, state: State, now: float, *, put_back: bool | None = None) -> None:
        """As a whole, at once: its tickets are cancelled; a stale group's task goes back in front."""
        for member in group.members:
            if member.state not in ENDS:
                self._end_sample(member, state)
        self.book.drop(group, Phase.ENDED)
        del self.groups[group.group_id]
        if state is State.STALE if put_back is None else put_back:
            self.tasks.put_back(group.assignment)
        outcomes = [member.outcome for member in group.accepted() if member.outcome]
        record = GroupRecord(
            group_id=group.group_id,
            task_index=group.assignment.task_index,
            end=NAMES[state],
            version=group.version,
            attempts=group.assignment.attempts,
            rewards=[outcome.reward for outcome in outcomes],
            seconds=now - group.opened_at,
            success=sum(outcome.success for outcome in outcomes) / len(outcomes) if outcomes else None,
        )
        self.tasks.source.ended(record)
        self._out.append(record)
        for member in group.members:
            member.outcome = None  # with its payload, which else would wait for the garbage collector

    # ------------------------------------------------------------ batches

    def _assemble(self, now: float) -> bool:
        """Emit the next batch if the learner asked for it, B groups are ready, and none is worth waiting for."""
        step, settings = self.e, self.settings
        if step not in self.requested or step >= settings.steps or self.book.ready < settings.groups_per_batch:
            return False
        if self._in_round():
            return False
        if self.book.held_for(self.floor):
            if self._hold_since is None:
                self._hold_since = now
            if now < self._hold_since + settings.hold_deadline_s:
                return False
        groups = self.book.take(settings.groups_per_batch)
        samples = [self._batch(sample) for group in groups for sample in group.accepted()]
        kept = [replace(sample, outcome=replace(sample.outcome, payload=None)) for sample in samples]
        for sample in samples:  # independent of the book: from what each episode itself says
            if step - sample_version(sample) > self._bound:
                self.stats.freshness_violations += 1
        self.batches[step] = (groups, kept)
        metrics = batch_metrics(step, kept) | self._state_metrics(now)
        self._out.append(EmitBatch(step, samples, metrics))
        del self.requested[step]
        self.e += 1
        self._filtered = 0
        self._hold_since = None
        self._cut_off(now)
        return True

    def _batch(self, sample: Sample) -> BatchSample:
        group, outcome = sample.group, sample.outcome
        assert outcome is not None and group.version is not None
        self.ledger.move(sample, State.BATCHED)
        sample.outcome = replace(outcome, payload=None)  # the payload leaves with the batch
        return BatchSample(sample.sample_id, group.group_id, group.assignment.task_index, group.version, outcome)

    def _in_round(self) -> bool:
        """With the per-batch barrier: episodes of the round are still queued or running."""
        running = self.servers.outstanding or self.ledger.samples[State.QUEUED]
        return self.settings.batch_barrier and bool(running)

    def _may_begin(self) -> bool:
        """With the per-batch barrier groups begin as one round, once their tickets can go out."""
        return not self.settings.batch_barrier or (not self._in_round() and self.n >= self.floor)

    def _cut_off(self, now: float) -> None:
        """After an assembly: groups that fit no later batch end, all of them after the last one.

        With `surplus="cancel"`, so does what is unfinished beyond what admission allows without redundancy.
        """
        if self.e == self.settings.steps:
            for group in [group for group in self.groups.values() if group.phase is not Phase.BATCHED]:
                self._end_group(group, State.REDUNDANT, now)
            return
        for count, group in enumerate(self.book.older_than(self.floor)):
            surplus = count < self.settings.redundant_groups
            self._end_group(group, State.REDUNDANT if surplus else State.STALE, now, put_back=True)
        excess = len(self.groups) - (self.limit - self.settings.redundant_groups)
        if self.settings.surplus == "cancel" and excess > 0:
            for group in list(islice(self._surplus(), excess)):
                self._end_group(group, State.REDUNDANT, now, put_back=True)

    def _surplus(self) -> Iterator[Group]:
        """Unfinished groups that no batch would wait for: those with a version, oldest first, then those without.

        What has not sampled a token does not age. While tickets may go out (n >= e - S) it is of a later batch, and its
        task, were it cancelled, would begin again in the same turn. While none may, what it sampled now would fit
        no later batch, so whatever runs of it ends like the rest.
        """
        yield from self.book.unfinished()
        if self.n >= self.floor:
            return
        for group in self.groups.values():
            unstarted = group.phase is Phase.OPEN and group.version is None
            surplus = unstarted and group.assignment.attempts < self.settings.hold_patience
            if surplus and any(member.state is State.RUNNING for member in group.members):
                yield group

    def _trained(self, now: float) -> None:
        groups, samples = self.batches.pop(self.n)
        for group in groups:
            self._end_group(group, State.TRAINED, now)
        self.stats.trained(self.n, samples)
        self.advance(self.n + 1)

    # ------------------------------------------------------------ the end

    def _drain(self, now: float) -> None:
        """All steps are trained: the end comes with the last evaluation, ticket and usage, or by the deadline."""
        settings = self.settings
        awaited = settings.eval_tasks > 0 and settings.steps not in self.evaluations.requested
        if self.finished_at is not None or awaited or self.evaluations.pending:
            return
        if self._drain_since is None:
            self._drain_since = now
        settled = not self.servers.outstanding and not self.ledger.unreconciled
        if not settled and now < self._drain_since + settings.drain_deadline_s:
            return
        self.finished_at = now
        self.ledger.give_up_waiting()
        self._out.append(Finished(self.report()))
        if self.ledger.mismatches:
            self._stop(f"the ledger does not close ({self.ledger.mismatches} times): {self.ledger.first_mismatch}")
        try:
            self.ledger.check()
        except LedgerError as error:
            self._stop(f"the ledger does not close: {error}")

    def report(self) -> dict[str, Any]:
        """The closing report (`Statistics.report`), at any time."""
        return self.stats.report(self.n, self.ledger) | {"quarantines": self.servers.quarantines}

    def _stop(self, reason: str) -> None:
        """The run cannot go on; only the first reason is told."""
        if not self.stopped:
            self._out.append(StopRun(reason))
        self.stopped = True

    # ------------------------------------------------------------ what can be seen from outside

    def _state_metrics(self, now: float) -> dict[str, float]:
        samples = self.ledger.samples
        return {
            "queue/queued": float(samples[State.QUEUED]),
            "queue/running": float(samples[State.RUNNING]),
            "queue/waiting": float(samples[State.WAITING]),
            "queue/batched": float(samples[State.BATCHED]),
            "broker/wait_s": now - self.requested[self.e],
            "broker/hold_s": 0.0 if self._hold_since is None else now - self._hold_since,
            "broker/filtered_groups": float(self._filtered),
            "broker/stale_samples": float(samples[State.STALE]),
            "broker/redundant_samples": float(samples[State.REDUNDANT]),
            "broker/failed_samples": float(samples[State.FAILED]),
            "broker/hedged_episodes": float(self.stats.hedged),
            "broker/quarantines": float(self.servers.quarantines),
        }

    def describe(self) -> dict[str, Any]:
        """The state in numbers, for whoever must find out who waits for whom."""
        return {
            "version": self.n,
            "next_step": self.e,
            "requested": sorted(self.requested),
            "groups": len(self.groups),
            "ready_groups": self.book.ready,
            "groups_per_batch": self.settings.groups_per_batch,
            "held_for": self.book.held_for(self.floor),
            "queued_evaluations": len(self.evaluations.queue),
            "running_evaluations": len(self.evaluations.running),
            "servers": {s.index: f"{len(s.live)}/{s.capacity}" for s in self.servers.by_index.values()},
            "ledger": self.ledger.report(),
        }
