"""Second copies of slow episodes: which run longer than a quantile of their peers, without scans.

Tickets are watched in order of issue, so the longest-running one stands in front; each is looked at a constant
number of times. Peers are the last `WINDOW` episodes that finished, whatever their task.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from rollout.broker.groups import Groups
from rollout.broker.policy import Proposals, SchedulingPolicy, StartCopy
from rollout.broker.records import Attempt, State

WINDOW = 512
MIN_PEERS = 20  # before so many have finished nothing is called slow


class Hedging(SchedulingPolicy):
    def __init__(self, groups: Groups) -> None:
        super().__init__(groups)
        self.quantile = self.rules.hedge_quantile
        self._watched: deque[Attempt] = deque()
        self._slow: deque[Attempt] = deque()  # due for a second copy
        self._times: deque[float] = deque()
        self._sorted: list[float] = []

    def issued(self, now: float, attempt: Attempt) -> Proposals:
        self._watched.append(attempt)
        return ()

    def finished(self, now: float, attempt: Attempt) -> Proposals:
        if len(self._times) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._times.popleft())]
        seconds = now - attempt.issued_at
        self._times.append(seconds)
        insort(self._sorted, seconds)
        return ()

    def event_ends(self, now: float) -> Proposals:
        while (due := self.next_deadline()) is not None and due <= now:
            self._slow.append(self._watched.popleft())
        return self._copies() if self._slow else ()

    def _copies(self) -> Proposals:
        """At most the share 1 - quantile of the samples that run, or wait for their group, has a second copy, or one.

        Those that wait count: they are what the slow ones hold up. Of the running ones alone, few are left in the end.
        """
        samples = self.ledger.samples
        share = (1 - self.quantile) * (samples[State.RUNNING] + samples[State.WAITING])
        while self._slow:
            slow = self._slow[0]
            if wants_copy(slow):
                if self.ledger.spares < max(1.0, share):
                    yield StartCopy(slow)
                if wants_copy(slow):
                    return  # no further one is allowed, or there is no seat for it
            self._slow.popleft()

    def next_deadline(self) -> float | None:
        """When the longest-running episode becomes slow."""
        while self._watched and not wants_copy(self._watched[0]):
            self._watched.popleft()
        if not self._watched or len(self._sorted) < MIN_PEERS:
            return None
        place = min(len(self._sorted) - 1, int(self.quantile * len(self._sorted)))
        return self._watched[0].issued_at + self._sorted[place]


def wants_copy(attempt: Attempt) -> bool:
    sample = attempt.sample
    return attempt.live and sample.attempt is attempt and sample.state is State.RUNNING and sample.spare is None
