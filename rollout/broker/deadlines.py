"""By when tickets must have ended. All have the same time, so they stand in the order of their issue."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from rollout.broker.ledger import Ledger
from rollout.broker.records import Attempt, State

BACKSTOP_S = 30.0  # an environment server ends its own overdue episodes; after this much longer the broker does


class Deadlines:
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
