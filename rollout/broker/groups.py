"""Groups from their admission (F1) to their end: versions, expiry (F3), results and retries.

An unbatched group whose first token is known stands in the bucket of its version. Versions that matter span S + 1
values, so walking the buckets' keys is cheap, and each group is touched only when it changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from rollout.broker.actions import GroupRecord, Outcome
from rollout.broker.records import ENDS, NAMES, Attempt, Group, Phase, Sample, State
from rollout.broker.rules import Rules
from rollout.broker.statistics import Statistics
from rollout.broker.tasks import Assignment, TaskQueue
from rollout.broker.tickets import Tickets


class Groups:
    """`rank` orders the issue of groups, lower first; ties go by issue number."""

    def __init__(self, rules: Rules, tickets: Tickets, tasks: TaskQueue, rank: Callable[[Assignment], float]) -> None:
        self.rules = rules
        self.tickets = tickets
        self.tasks = tasks
        self.stats = Statistics()
        self._rank = rank
        self.size = rules.group_size  # G

        self.open: dict[int, Group] = {}  # open, ready or batched: what F1 bounds
        self.ready = 0
        self.given_up = 0  # in a row, without any episode finishing
        self._by_version: dict[int, dict[int, Group]] = {}
        self._protected: Counter[int] = Counter()  # OPEN groups that a batch waits for (F5), by version
        self.advance_to(0, 0)

    def advance_to(self, n: int, e: int) -> None:
        """n versions are published, e batches assembled."""
        self.n = n
        self.e = e
        self.limit = self.rules.admitted(n)
        self.floor = e - self.rules.staleness_bound  # an unbatched group with a smaller v fits no later batch

    def admit(self, now: float) -> None:
        """F1: new groups up to the limit, whole."""
        while len(self.open) < self.limit:
            group_id, assignment = self.tasks.take()
            size = self.rules.members
            group = Group(group_id, assignment, self._rank(assignment), now, alive=size)
            self.open[group_id] = group

            for member in range(size):
                sample = Sample(group_id * size + member, group)
                group.members.append(sample)
                self.tickets.ledger.issue(sample)
                self.tickets.enqueue(sample)

    # ------------------------------------------------------------ results

    def sampled_first_token(self, attempt: Attempt, version: int, now: float) -> list[GroupRecord]:
        """The first token of a running attempt was sampled by `version`."""
        group = attempt.sample.group
        if attempt.version is not None and attempt.version <= version:
            return []
        attempt.version = version
        is_older = group.version is None or version < group.version
        return self.set_version(group, version, now) if is_older and attempt is attempt.sample.attempt else []

    def accept(self, attempt: Attempt, outcome: Outcome, now: float) -> list[GroupRecord]:
        """The first result of a sample: waits for its group's others."""
        sample = attempt.sample
        group = sample.group
        if outcome.first_version >= 0:
            attempt.version = outcome.first_version
        elif attempt.version is None:
            attempt.version = attempt.stamp  # nothing was generated

        sample.outcome = outcome
        self.tickets.ledger.move(sample, State.WAITING)
        group.done += 1
        if group.done == self.size:
            for member in group.members:
                if member.state is State.QUEUED or member.state is State.RUNNING:
                    self._end_sample(member, State.REDUNDANT)
        return self.set_version(group, group.live_version(), now)

    def retry(self, attempt: Attempt, now: float) -> list[GroupRecord]:
        """An attempt has failed. The group is given up when fewer than G members can still deliver."""
        sample = attempt.sample
        if not attempt.is_running:
            return []
        if attempt is sample.spare:
            self.tickets.drop_spare(sample)
            return []

        if not self.tickets.retry(attempt):
            sample.group.alive -= 1
        group = sample.group
        if group.alive >= self.size:
            return self.set_version(group, group.live_version(), now)
        self.given_up += 1
        return self.end(group, State.FAILED, now)

    def set_ready(self, group: Group) -> None:
        """All G results are in: v(group) is final."""
        self._count_protected(group, -1)
        group.phase = Phase.READY
        self.ready += 1

    # ------------------------------------------------------------ versions

    def set_version(self, group: Group, version: int | None, now: float) -> list[GroupRecord]:
        """v(group) is now `version`, which may end the group (F3)."""
        if version != group.version:
            self._leave_bucket(group)
            group.version = version
            if version is not None:
                self._by_version.setdefault(version, {})[group.group_id] = group
                self._count_protected(group, 1)
        return self.end(group, State.STALE, now) if version is not None and version < self.floor else []

    def held_for(self) -> int:
        """F5: unfinished groups that the next batch waits for, because they would expire with it once again."""
        return self._protected[self.floor]

    def unfinished(self) -> Iterator[Group]:
        """Open groups with a version that no batch waits for, oldest v first."""
        for version in sorted(self._by_version):
            for group in list(self._by_version[version].values()):
                if group.phase is Phase.OPEN and not self.is_protected(group):
                    yield group

    def is_protected(self, group: Group) -> bool:
        """P: it has been cut off so often that F5 waits for it."""
        return group.assignment.attempts >= self.rules.hold_patience

    def _count_protected(self, group: Group, change: int) -> None:
        if group.version is not None and group.phase is Phase.OPEN and self.is_protected(group):
            self._protected[group.version] += change

    def _leave_bucket(self, group: Group) -> None:
        if group.version is None or group.phase not in (Phase.OPEN, Phase.READY):
            return
        bucket = self._by_version[group.version]
        del bucket[group.group_id]
        if not bucket:
            del self._by_version[group.version]
        self._count_protected(group, -1)

    # ------------------------------------------------------------ ends

    def cut_off(self, now: float) -> list[GroupRecord]:
        """After an assembly: groups that fit no later batch end, all of them after the last one.

        With R > 0 that is what redundancy was for: so many of them count as redundant.
        """
        self._protected = +self._protected  # versions with a count above 0
        if self.e == self.rules.steps:
            left = [group for group in self.open.values() if group.phase is not Phase.BATCHED]
            return [record for group in left for record in self.end(group, State.REDUNDANT, now)]

        expired = [bucket for version, bucket in self._by_version.items() if version < self.floor]
        by_issue = sorted((group for bucket in expired for group in bucket.values()), key=lambda group: group.group_id)
        records: list[GroupRecord] = []
        for count, group in enumerate(by_issue):
            end = State.REDUNDANT if count < self.rules.redundant_groups else State.STALE
            records += self.end(group, end, now, put_back=True)
        return records

    def take(self, group: Group) -> None:
        """A ready group goes into a batch."""
        self._leave(group, Phase.BATCHED)

    def end(self, group: Group, end: State, now: float, *, put_back: bool | None = None) -> list[GroupRecord]:
        """As a whole, at once: its tickets are revoked; a stale group's task goes back in front."""
        for member in group.members:
            if member.state not in ENDS:
                self._end_sample(member, end)
        self._leave(group, Phase.ENDED)
        del self.open[group.group_id]
        if put_back is None:
            put_back = end is State.STALE
        if put_back:
            self.tasks.put_back(group.assignment)

        outcomes = [member.outcome for member in group.accepted() if member.outcome]
        record = GroupRecord(
            group_id=group.group_id,
            task_index=group.assignment.task_index,
            end=NAMES[end],
            version=group.version,
            attempts=group.assignment.attempts,
            rewards=[outcome.reward for outcome in outcomes],
            seconds=now - group.opened_at,
            success=sum(outcome.success for outcome in outcomes) / len(outcomes) if outcomes else None,
        )
        self.tasks.source.ended(record)

        for member in group.members:
            member.outcome = None  # with its payload, which else would wait for the garbage collector
        return [record]

    def _end_sample(self, sample: Sample, end: State) -> None:
        if sample.state is State.RUNNING and sample.attempt is not None:
            self.tickets.drop_spare(sample)
            self.tickets.revoke(sample.attempt, end)
        elif sample.outcome is not None and end is not State.TRAINED:
            self.stats.cut_finished(NAMES[end], sample.outcome)
        self.tickets.ledger.move(sample, end)

    def _leave(self, group: Group, phase: Phase) -> None:
        """The group is batched or ended: no bucket holds it any more."""
        self._leave_bucket(group)
        if group.phase is Phase.READY:
            self.ready -= 1
        group.phase = phase
