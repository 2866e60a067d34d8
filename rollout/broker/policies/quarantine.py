"""Quarantine: a server that fails `quarantine_failures` episodes in a row gets no tickets for a while.

Twice as long each time until it has finished one; after it a single further failure sends it back. A death that takes
episodes with it is one failure. The index is the server: its next incarnation goes on with the count, and serves the
rest of a quarantine. The last server in service is never sent: it may be the tasks that fail.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from rollout.broker.groups import Groups
from rollout.broker.policy import Proposals, SchedulingPolicy, Suspend
from rollout.broker.records import Attempt


@dataclass(slots=True)
class Health:
    """Of one server, over its incarnations."""

    failures: int = 0  # in a row
    quarantines: int = 0  # in a row
    until: float = 0.0  # end of its last quarantine, seconds
    quarantined: bool = False


class Quarantine(SchedulingPolicy):
    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        self.health: dict[int, Health] = {}  # by server
        self.quarantines = 0  # ever
        self._in_quarantine = 0
        self._releases: list[tuple[float, int]] = []  # heap of (end, server); some are out of date

    def finished(self, now: float, attempt: Attempt) -> Proposals:
        health = self.health[attempt.server]
        health.failures = 0
        health.quarantines = 0
        return ()

    def failed(self, now: float, server: int) -> Proposals:
        health = self.health[server]
        if not health.quarantined:
            health.failures += 1
            yield from self._suspend_if_due(server, now)

    def server_joined(self, now: float, server: int) -> Proposals:
        """A new incarnation is judged by what became of the ones before."""
        health = self.health.setdefault(server, Health())
        if health.until > now and not self._is_last():
            yield self._begin(server, health.until)
        elif health.failures:
            yield from self._suspend_if_due(server, now)

    def server_left(self, now: float, server: int, held: bool) -> Proposals:
        health = self.health[server]
        health.failures += held and not health.quarantined
        self._in_quarantine -= health.quarantined
        health.quarantined = False
        return ()

    def event_begins(self, now: float) -> Proposals:
        return self._release(now) if self._releases and self._releases[0][0] <= now else ()

    def _release(self, now: float) -> Proposals:
        """Whose quarantine is over may have tickets again."""
        while self._releases and self._releases[0][0] <= now:
            _, server = heapq.heappop(self._releases)
            health = self.health[server]
            if health.quarantined and health.until <= now:
                health.quarantined = False
                self._in_quarantine -= 1
                yield Suspend(server, suspended=False)

    def next_deadline(self) -> float | None:
        return self._releases[0][0] if self._releases else None

    def counts(self) -> dict[str, float]:
        return {"quarantines": self.quarantines}

    def _suspend_if_due(self, server: int, now: float) -> Proposals:
        health = self.health[server]
        if (health.failures < self.rules.quarantine_failures and not health.quarantines) or self._is_last():
            return

        health.failures = 0
        self.quarantines += 1
        until = now + self.rules.quarantine_s * 2.0 ** min(health.quarantines, 10)
        health.quarantines += 1
        yield self._begin(server, until)

    def _begin(self, server: int, until: float) -> Suspend:
        health = self.health[server]
        health.quarantined = True
        health.until = until
        self._in_quarantine += 1
        heapq.heappush(self._releases, (until, server))
        return Suspend(server)

    def _is_last(self) -> bool:
        return len(self.servers.by_index) - self._in_quarantine <= 1
