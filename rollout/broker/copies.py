"""Second copies of running samples, which a hook may ask for: a ticket more, with the same seed, on another server.

The first to finish counts and the other is revoked. When one fails the other goes on.
"""

from __future__ import annotations

from rollout.broker.actions import IssueTicket
from rollout.broker.records import Attempt, State
from rollout.broker.tickets import Tickets


class Copies:
    def __init__(self, tickets: Tickets) -> None:
        self.tickets = tickets
        self.ledger = tickets.ledger

    def start(self, slow: Attempt, n: int, oldest_useful: int, now: float) -> list[IssueTicket]:
        """Of a running sample, on another server, if one has a free seat (F2 as for any ticket)."""
        server = self.tickets.servers.next(avoid=slow.server)
        if server is None or n < oldest_useful:
            return []
        return [self.tickets.start(slow.sample, server, n, now)]

    def settle(self, attempt: Attempt) -> None:
        """Its sample has its result."""
        sample = attempt.sample
        other = sample.attempt if attempt is sample.spare else sample.spare
        if attempt is sample.spare:
            self.ledger.promote(sample)
        if other is not None and other.live:
            self.tickets.revoke(other, State.REDUNDANT)

    def go_on(self, attempt: Attempt) -> bool:
        """It has failed, or is overdue: whether the other copy of its sample goes on."""
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
