"""Evaluations: a class of tickets outside admission and ledger, which take credit before training tickets.

An episode that fails is tried again up to `max_attempts` times; after that its task counts as failed and
stands outside the means.
"""

from __future__ import annotations

from collections import Counter, deque

from msgspec.structs import replace

from rl.core.messages import Version
from rollout.broker.actions import EvalEpisode, EvalReport, Outcome


class Evaluation:
    def __init__(self, version: Version, tasks: int, now: float) -> None:
        self.version, self.tasks, self.began = version, tasks, now
        self.outcomes: list[tuple[int, Outcome]] = []  # with the task's index, in order of arrival
        self.failed = 0

    @property
    def complete(self) -> bool:
        return len(self.outcomes) + self.failed >= self.tasks

    def report(self, now: float) -> EvalReport:
        outcomes = [outcome for _, outcome in self.outcomes]
        answered = max(1, len(outcomes))
        return EvalReport(
            version=self.version,
            tasks=self.tasks,
            failed=self.failed,
            reward=sum(o.reward for o in outcomes) / answered,
            accuracy=sum(o.success for o in outcomes) / answered,
            length=sum(o.length for o in outcomes) / answered,
            versions=dict(sorted(Counter(o.first_version for o in outcomes).items())),
            seconds=now - self.began,
            episodes=[
                EvalEpisode(task, o.success, o.reward, o.turns, o.length, o.seconds, o.first_version)
                for task, o in sorted(self.outcomes, key=lambda each: each[0])
            ],
        )


class EvalAttempt:
    __slots__ = ("evaluation", "failures", "server", "task_index")

    def __init__(self, evaluation: Evaluation, task_index: int, failures: int) -> None:
        self.evaluation, self.task_index, self.failures = evaluation, task_index, failures
        self.server = -1


class Evaluations:
    def __init__(self, max_attempts: int) -> None:
        self.max_attempts = max_attempts
        self.queue: deque[EvalAttempt] = deque()
        self.running: dict[int, EvalAttempt] = {}  # by ticket
        self.tickets: set[int] = set()  # all that went out, so that late usage of one is known
        self.requested: set[int] = set()  # versions
        self.pending = 0  # evaluations

    def request(self, version: Version, tasks: int, now: float) -> None:
        if version.n in self.requested or tasks < 1:
            return
        self.requested.add(version.n)
        self.pending += 1
        evaluation = Evaluation(version, tasks, now)
        self.queue.extend(EvalAttempt(evaluation, task, 0) for task in range(tasks))

    def start(self, ticket_id: int, server: int) -> EvalAttempt:
        attempt = self.queue.popleft()
        attempt.server = server
        self.running[ticket_id] = attempt
        self.tickets.add(ticket_id)
        return attempt

    def end(self, ticket_id: int, outcome: Outcome | None, now: float) -> EvalReport | None:
        """A ticket has ended, without a result if `outcome` is None; the report when it was the last."""
        attempt = self.running.pop(ticket_id)
        evaluation = attempt.evaluation
        if outcome is not None:
            evaluation.outcomes.append((attempt.task_index, replace(outcome, payload=None)))
        elif attempt.failures + 1 < self.max_attempts:
            self.queue.appendleft(EvalAttempt(evaluation, attempt.task_index, attempt.failures + 1))
        else:
            evaluation.failed += 1
        if not evaluation.complete:
            return None
        self.pending -= 1
        return evaluation.report(now)
