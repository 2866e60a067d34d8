"""Evaluations, and the end of the run, which waits for them.

Their tickets are of their own kind, outside admission and ledger, and take seats before training tickets.

An episode that fails is tried again up to `max_attempts` times; after that its sample counts as failed and
stands outside the means. So does one whose reward is not known, at once.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from rl.config.seeds import sample_seed
from rl.observe.intervals import success_rates
from rl.wire.messages import Ticket, Version
from rollout.broker.actions import EpisodeOutcome, EvalEpisode, EvalReport, IssueTicket
from rollout.broker.groups import Groups


@dataclass(slots=True, eq=False)
class Evaluation:
    version: Version
    tasks: int
    began: float
    episodes: list[EvalEpisode] = field(default_factory=list)  # in order of arrival
    failed: int = 0
    samples: int = 1  # of each task

    def report(self, now: float) -> EvalReport:
        episodes = self.episodes
        answered = max(1, len(episodes))
        rates = success_rates((each.task_index, each.success) for each in episodes)

        return EvalReport(
            version=self.version,
            tasks=self.tasks,
            failed=self.failed,
            reward=sum(each.reward for each in episodes) / answered,
            accuracy=rates["avg"][0],
            length=sum(each.length for each in episodes) / answered,
            versions=dict(sorted(Counter(each.version for each in episodes).items())),
            seconds=now - self.began,
            episodes=sorted(episodes, key=lambda each: (each.task_index, each.sample)),
            samples=self.samples,
            rates=rates,
        )


@dataclass(slots=True)
class EvalAttempt:
    evaluation: Evaluation
    task_index: int
    failures: int = 0
    server: int = -1
    ticket: Ticket | None = None
    is_running: bool = True  # an evaluation is never cut off
    sample: int = 0  # of its task


class Evaluations:
    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.rules = groups.rules
        self.tickets = groups.tickets
        self.queue: deque[EvalAttempt] = deque()
        self.running: dict[int, EvalAttempt] = {}  # by ticket
        self.issued: set[int] = set()  # every ticket that went out, so that late usage of one is known
        self.requested: set[int] = set()  # versions
        self.pending: list[Evaluation] = []

    def request(self, version: Version, tasks: int, now: float) -> None:
        if version.n in self.requested or tasks < 1:
            return
        self.requested.add(version.n)
        samples = self.rules.eval_samples
        evaluation = Evaluation(version, tasks, now, samples=samples)
        self.pending.append(evaluation)
        # Samples of one task side by side: they share a prompt.
        self.queue.extend(EvalAttempt(evaluation, task, sample=n) for task in range(tasks) for n in range(samples))

    def roll_back(self, version: Version) -> None:
        """Note that from `version` on all versions are others now: their evaluations are dropped, earlier ones go on in
        its timeline."""
        self.requested = {n for n in self.requested if n < version.n}
        self.pending = [each for each in self.pending if each.version.n < version.n]
        self.queue = deque(attempt for attempt in self.queue if attempt.evaluation in self.pending)
        for evaluation in self.pending:
            evaluation.version = Version(version.timeline, evaluation.version.n)

    def issue(self) -> list[IssueTicket]:
        """Tickets while there are seats."""
        issued: list[IssueTicket] = []
        while self.queue and (server := self.tickets.servers.next()) is not None:
            attempt = self.queue.popleft()
            attempt.server = server.index

            ticket = Ticket(
                ticket_id=self.tickets.new_id(),
                sample_id=-1,
                group_id=-1,
                task_index=attempt.task_index,
                version=attempt.evaluation.version,
                attempt=attempt.failures,
                kind="eval",
                deadline_s=self.rules.episode_deadline_s,
                seed=sample_seed(self.rules.seed, -1 - attempt.task_index - attempt.sample * attempt.evaluation.tasks),
                temperature=self.rules.eval_temperature,
            )

            attempt.ticket = ticket
            self.running[ticket.ticket_id] = attempt
            self.issued.add(ticket.ticket_id)
            self.tickets.servers.take(server, ticket.ticket_id)
            self.tickets.ledger.evaluation_started(ticket, server.index)
            issued.append(IssueTicket(server.index, ticket))
        return issued

    def end(self, ticket_id: int, outcome: EpisodeOutcome | None, now: float) -> list[EvalReport]:
        """A ticket has ended, without a result if `outcome` is None; the report when it was the last."""
        attempt = self.running.pop(ticket_id)
        evaluation = attempt.evaluation
        self.tickets.servers.give_back(attempt.server, ticket_id)
        if evaluation not in self.pending:
            self.tickets.ledger.evaluation_ended(ticket_id, "stale")
            return []

        answered = outcome is not None and outcome.timeline == self.tickets.timeline  # else other weights answered
        judged = answered and outcome is not None and not outcome.unrewarded
        self.tickets.ledger.evaluation_ended(ticket_id, "evaluated" if judged else "failed")
        if outcome is not None and judged:
            shown = {name: getattr(outcome, name) for name in EvalEpisode.__struct_fields__ if hasattr(outcome, name)}
            evaluation.episodes.append(EvalEpisode(attempt.task_index, sample=attempt.sample, **shown))
        elif not answered and attempt.failures + 1 < self.rules.max_attempts:
            again = EvalAttempt(evaluation, attempt.task_index, attempt.failures + 1, sample=attempt.sample)
            self.queue.appendleft(again)
        else:
            evaluation.failed += 1

        if len(evaluation.episodes) + evaluation.failed < evaluation.tasks * evaluation.samples:
            return []
        self.pending.remove(evaluation)
        report = evaluation.report(now)
        self.groups.stats.evaluated(report)
        self.groups.run.evaluated(evaluation.version.n, now)
        return [report]


class Ending:
    """When a run that has trained all its steps may end: with the last evaluation, ticket and usage, or by a deadline.

    An evaluation that is asked for meanwhile is waited for, and the deadline begins anew.
    """

    def __init__(self, evaluations: Evaluations) -> None:
        self.evaluations = evaluations
        self.rules = evaluations.rules
        self.since: float | None = None  # when it began to wait for tickets and usage
        self.has_come = False

    def comes(self, now: float) -> bool:
        """Whether it comes now, which is true once."""
        rules = self.rules
        awaited = rules.eval_tasks > 0 and self.evaluations.groups.run.steps not in self.evaluations.requested
        if self.has_come or awaited or self.evaluations.pending:
            self.since = None
            return False

        if self.since is None:
            self.since = now
        tickets = self.evaluations.tickets
        settled = not tickets.servers.outstanding and not tickets.ledger.unreconciled
        if not settled and now < self.since + rules.drain_deadline_s:
            return False

        self.has_come = True
        self.since = None
        return True

    def next_deadline(self) -> float | None:
        return None if self.since is None else self.since + self.rules.drain_deadline_s
