"""When a run that has trained all its steps may end: with the last evaluation, ticket and usage, or by a deadline."""

from __future__ import annotations

from rollout.broker.evaluation import Evaluations


class Ending:
    """An evaluation that is asked for meanwhile is waited for, and the deadline begins anew."""

    def __init__(self, evaluations: Evaluations) -> None:
        self.evaluations = evaluations
        self.rules = evaluations.rules
        self.since: float | None = None  # when it began to wait for tickets and usage
        self.has_come = False

    def comes(self, now: float) -> bool:
        """True once: it comes now."""
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
