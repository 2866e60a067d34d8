"""Groups from their admission (F1) to their end: v(group), expiry (F3), results and retries."""

from __future__ import annotations

from collections.abc import Callable

from rollout.broker.actions import EpisodeOutcome, GroupRecord
from rollout.broker.group_state import Ages, Duration, FirstEpisodes
from rollout.broker.ledger import state_of
from rollout.broker.records import ENDS, NAMES, Attempt, Group, Phase, Sample, State
from rollout.broker.rules import Rules
from rollout.broker.statistics import Statistics
from rollout.broker.tasks import DrawnTask, TaskQueue
from rollout.broker.tickets import Tickets


class Groups:
    """`order` is that of issue, by task, lower first; ties go by issue number."""

    def __init__(self, rules: Rules, tickets: Tickets, tasks: TaskQueue, order: Callable[[DrawnTask], float]) -> None:
        self.rules = rules
        self.tickets = tickets
        self.tasks = tasks
        self.stats = Statistics()
        self._order = order
        self.size = rules.group_size  # G
        self.first = FirstEpisodes(rules, tickets)

        self.open: dict[int, Group] = {}  # unfinished, ready or batched: what F1 bounds
        self.ages = Ages(rules.hold_patience)
        self.ready = 0
        self.given_up = 0  # in a row, without any episode finishing
        self.run = Duration(rules.steps, rules.seconds)
        self.advance_to(0, 0)

    def advance_to(self, n: int, e: int) -> None:
        """n versions are published, e batches assembled."""
        self.n = n
        self.e = e
        self.limit = self.rules.admitted(n)
        self.oldest_useful = e - self.rules.staleness_bound  # an unbatched group with a smaller v fits no later batch

    def admit(self, now: float) -> None:
        """F1: new groups up to the limit, with their first episodes."""
        while len(self.open) < self.limit:
            group_id, task = self.tasks.take()
            group = Group(group_id, task, self._order(task), now, alive=self.first.members)
            self.open[group_id] = group
            self.first.begin(group)

    # ------------------------------------------------------------ results and versions

    def sampled_first_token(self, attempt: Attempt, version: int, now: float) -> list[GroupRecord]:
        """The first token of a running attempt was sampled by `version`."""
        group = attempt.sample.group
        if attempt.version is not None and attempt.version <= version:
            return []
        attempt.version = version
        is_older = group.version is None or version < group.version
        return self.set_version(group, version, now) if is_older and attempt is attempt.sample.attempt else []

    def accept(self, attempt: Attempt, outcome: EpisodeOutcome, now: float) -> list[GroupRecord]:
        """The first result of a sample: waits for its group's others."""
        sample = attempt.sample
        group = sample.group
        attempt.version = outcome.version
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
        group = attempt.sample.group
        if not attempt.is_running:
            return []
        is_lost = not self.tickets.retry(attempt)
        group.alive -= is_lost
        if group.alive >= self.size:
            if is_lost:
                self.first.replace(group)
            return self.set_version(group, group.live_version(), now)

        self.given_up += 1
        return self.end(group, State.FAILED, now)

    def set_ready(self, group: Group) -> None:
        """All G results are in: v(group) is final."""
        self.ages.remove(group)
        group.phase = Phase.READY
        self.ages.add(group)
        self.ready += 1

    def set_version(self, group: Group, version: int | None, now: float) -> list[GroupRecord]:
        """v(group) is now `version`, which may end the group (F3)."""
        if version != group.version:
            self.ages.remove(group)
            group.version = version
            self.ages.add(group)
        return self.end(group, State.STALE, now) if version is not None and version < self.oldest_useful else []

    def held_for(self) -> int:
        """F5: unfinished groups that the next batch waits for, because they would expire with it once again."""
        return self.ages.protected(self.oldest_useful)

    # ------------------------------------------------------------ ends

    def cut_off(self, now: float) -> list[GroupRecord]:
        """End, after an assembly, the groups that fit no later batch, all of them after the last one.

        With R > 0 that is what redundancy was for: so many of them count as redundant.
        """
        if self.e == self.run.steps:
            left = [group for group in self.open.values() if group.phase is not Phase.BATCHED]
            return [record for group in left for record in self.end(group, State.REDUNDANT, now)]

        records: list[GroupRecord] = []
        for count, group in enumerate(self.ages.older_than(self.oldest_useful)):
            end = State.REDUNDANT if count < self.rules.redundant_groups else State.STALE
            records += self.end(group, end, now)
        return records

    def end(self, group: Group, end: State, now: float) -> list[GroupRecord]:
        """End a group as a whole, at once: its tickets are revoked; the task of one that was cut off goes back in
        front."""
        for member in group.members:
            if member.state not in ENDS:
                self._end_sample(member, end)
        self.leave(group, Phase.ENDED)
        del self.open[group.group_id]
        if end is State.STALE or (end is State.REDUNDANT and self.e < self.run.steps):
            self.tasks.put_back(group.task)

        record = group.record(end, now)
        self.tasks.source.ended(record)
        for member in group.members:
            member.outcome = None  # with its payload, which else would wait for the garbage collector
        return [record]

    def _end_sample(self, sample: Sample, end: State) -> None:
        running = sample.running()
        self.tickets.ledger.move(sample, end)
        for attempt in running:
            self.tickets.revoke(attempt, state_of(attempt))
        if sample.outcome is not None and end is not State.TRAINED:
            self.stats.cut_finished(NAMES[end], sample.outcome)

    def leave(self, group: Group, phase: Phase) -> None:
        """The group is batched or ended: it ages no more."""
        self.ages.remove(group)
        if group.phase is Phase.READY:
            self.ready -= 1
        group.phase = phase
