"""The hooks of the broker that Fresco brings: dynamic filtering, rounds, second copies, quarantine."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from pydantic import Field

from rl.config.section import Section
from rollout.broker.groups import Groups
from rollout.broker.hooks import BrokerHook, EndGroup, Proposals, StartCopy, Suspend
from rollout.broker.records import Attempt, Group, State

WINDOW = 512
MIN_PEERS = 20  # before so many have finished nothing is called slow


class ConstantGroups(BrokerHook):
    """Dynamic filtering: groups whose rewards are all equal have no advantage to learn from, and are replaced.

    The core's own, where the rules have `filter_constant_groups`. With `first_episodes` a group is looked at twice:
    when its first episodes have ended, and whole. Both look at rewards alone, never at who was first or how long an
    episode was. docs/freshness.md says why that turns no task's gradient.

    At most `max_filtered_per_step` a step; the next ones go on, so a batch always has B whole groups.
    """

    def __init__(self, groups: Groups) -> None:
        super().__init__(None, groups)
        self._begin_step()

    def completed(self, now: float, group: Group) -> Proposals:
        outcomes = group.rewarded()
        rewards = {outcome.reward for outcome in outcomes}
        if len(outcomes) < group.done < self.groups.size:  # some are not known: the rest may differ
            return
        if len(rewards) > 1 or self._filtered + self._settled >= self.rules.max_filtered_per_step:
            return

        if group.done == self.groups.size:
            self._filtered += 1
            self._successes += sum(outcome.success for outcome in outcomes)
            yield EndGroup(group, State.FILTERED)
        else:
            self._settled += 1
            yield EndGroup(group, State.SETTLED)

    def assembled(self, now: float) -> Proposals:
        self._begin_step()
        return ()

    def in_step(self) -> dict[str, float]:
        """What it did since the last batch."""
        return {
            "filtered_groups": self._filtered,
            "filtered_successes": self._successes,
            "settled_groups": self._settled,
        }

    def _begin_step(self) -> None:
        self._filtered = 0
        self._settled = 0
        self._successes = 0.0  # of the filtered ones' samples


class BatchBarrier(BrokerHook):
    """Rounds, a baseline: groups begin and batches are assembled only when no episode is queued or runs."""

    def may_assemble(self) -> bool:
        return not self.servers.outstanding and not self.ledger.samples[State.QUEUED]

    def may_admit(self) -> bool:
        """Whether new groups may begin: as one round, once their tickets can go out."""
        return self.may_assemble() and self.groups.n >= self.groups.oldest_useful


class HedgingOptions(Section):
    quantile: float = Field(0.95, gt=0, lt=1)
    """An episode that runs longer than this quantile of the recent ones' times gets a second copy."""


class Hedging(BrokerHook):
    """Second copies of slow episodes: which run longer than a quantile of their peers, without scans.

    Tickets are watched in order of issue, so the longest-running one stands in front; each is looked at a constant
    number of times. Peers are the last `WINDOW` episodes that finished, whatever their task.
    """

    Options = HedgingOptions

    def __init__(self, options: HedgingOptions, groups: Groups) -> None:
        super().__init__(options, groups)
        self.quantile = options.quantile
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


@dataclass(slots=True)
class Health:
    """The health of one server, over its incarnations."""

    failures: int = 0  # in a row
    quarantines: int = 0  # in a row
    until: float = 0.0  # end of its last quarantine, seconds
    quarantined: bool = False


class QuarantineOptions(Section):
    failures: int = Field(5, ge=1)
    """Failures in a row after which a server gets no tickets for a while."""
    seconds: float = Field(30.0, gt=0)
    """How long the first quarantine of a server lasts."""


class Quarantine(BrokerHook):
    """A server that fails `failures` episodes in a row gets no tickets for a while.

    Twice as long each time until it has finished one; after it a single further failure sends it back. A death that
    takes episodes with it is one failure. The index is the server: its next incarnation goes on with the count, and
    serves the rest of a quarantine. The last server in service is never sent: it may be the tasks that fail.
    """

    Options = QuarantineOptions

    def __init__(self, options: QuarantineOptions, groups: Groups) -> None:
        super().__init__(options, groups)
        self.failures = options.failures
        self.seconds = options.seconds
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
        """Servers whose quarantine is over may have tickets again."""
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
        if (health.failures < self.failures and not health.quarantines) or self._is_last():
            return

        health.failures = 0
        self.quarantines += 1
        until = now + self.seconds * 2.0 ** min(health.quarantines, 10)
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
