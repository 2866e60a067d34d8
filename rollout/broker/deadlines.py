"""When a ticket must have ended, and how long the learner may wait for a batch. The module is pure, like the core."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from rollout.broker.ledger import Ledger
from rollout.broker.records import Attempt, State

BACKSTOP_S = 30.0  # an environment server ends its own overdue episodes; after this much longer the broker does


class Deadlines:
    """When tickets must have ended. All have the same time, so they stand in the order of their issue."""

    def __init__(self, ledger: Ledger, seconds: float) -> None:
        self.ledger = ledger
        self.seconds = seconds + BACKSTOP_S
        self._due: deque[tuple[float, int]] = deque()  # (deadline, ticket)

    def add(self, ticket_id: int, now: float) -> None:
        self._due.append((now + self.seconds, ticket_id))

    def overdue(self, now: float) -> Iterator[Attempt]:
        """Attempts of running samples whose server should have ended them long ago."""
        while self._due and self._due[0][0] <= now:
            attempt = self.ledger.live(self._due.popleft()[1])
            if attempt is not None and attempt.sample.state is State.RUNNING:
                yield attempt

    def next(self) -> float | None:
        while self._due:
            due, ticket_id = self._due[0]
            if self.ledger.live(ticket_id) is not None:
                return due
            self._due.popleft()
        return None


class Patience:
    """How long the learner may wait for a batch: as long as it comes nearer.

        patience = Patience(deadline_s, now)
        patience.advanced(now)           # an answer has begun, grown or ended, an episode has, a copied file has grown
        patience.has_run_out(asked, now) # nothing of this for the deadline, since the learner asked
        patience.must_be_told(now)       # whether the learner must hear of it

    The learner has the same deadline and does not see what advances, so it is told.
    """

    def __init__(self, deadline_s: float, now: float) -> None:
        self.deadline_s = deadline_s
        self._advanced = self._told = now

    def advanced(self, now: float) -> None:
        self._advanced = now

    def has_run_out(self, asked: float, now: float) -> bool:
        """asked: when the learner began to wait."""
        return now - max(asked, self._advanced) > self.deadline_s

    def must_be_told(self, now: float) -> bool:
        """Whether something has advanced since it was last told, at most four times within the deadline.

        What it hears comes later than what it is told of: its own deadline never ends before ours.
        """
        if self._advanced <= self._told or now - self._told < self.deadline_s / 4:
            return False
        self._told = now
        return True
