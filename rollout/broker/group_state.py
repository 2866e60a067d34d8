"""What `Groups` keeps: groups by their age, which episodes of one have begun, and how long the run is."""

from __future__ import annotations

from collections import Counter

from rollout.broker.records import Group, Phase, Sample
from rollout.broker.rules import Rules
from rollout.broker.tickets import Tickets


class Ages:
    """Unbatched groups by v(group).

    Versions that matter span S + 1 values, so a walk over the versions is cheap, and each group is touched only when it
    changes. `patience` is P: how often a task may be cut off before batches wait for it (F5).
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._by_version: dict[int, dict[int, Group]] = {}
        self._protected: Counter[int] = Counter()  # unfinished groups that a batch waits for, by version

    def add(self, group: Group) -> None:
        if group.version is not None:
            self._by_version.setdefault(group.version, {})[group.group_id] = group
            self._count(group, 1)

    def remove(self, group: Group) -> None:
        """Take a group out, before its version or phase changes; without effect on a group that is not here."""
        if group.version is None or group.phase not in (Phase.UNFINISHED, Phase.READY):
            return
        groups = self._by_version[group.version]
        del groups[group.group_id]
        if not groups:
            del self._by_version[group.version]
        self._count(group, -1)

    def older_than(self, version: int) -> list[Group]:
        """The older groups, in the order of their issue."""
        found = [group for v, groups in self._by_version.items() if v < version for group in groups.values()]
        return sorted(found, key=lambda group: group.group_id)

    def is_protected(self, group: Group) -> bool:
        return group.task.cut_offs >= self.patience

    def protected(self, version: int) -> int:
        """Unfinished groups of this version that a batch waits for."""
        return self._protected[version]

    def _count(self, group: Group, change: int) -> None:
        if group.version is not None and group.phase is Phase.UNFINISHED and self.is_protected(group):
            self._protected[group.version] += change
            if not self._protected[group.version]:
                del self._protected[group.version]


class FirstEpisodes:
    """Which episodes of a group begin at once, and which only when the first have shown that they are worth it.

    Without `rules.first_episodes` all G + g begin at once, and nothing is left for later.
    """

    def __init__(self, rules: Rules, tickets: Tickets) -> None:
        self.tickets = tickets
        self.size = rules.group_size  # G
        self.members = rules.members  # G + g
        self.count = rules.first_episodes or rules.members

    def begin(self, group: Group) -> None:
        self._add(group, self.count)

    def widen(self, group: Group) -> None:
        """Begin the rest of a group whose results have differed."""
        self._add(group, self.members - len(group.members))

    def replace(self, group: Group) -> None:
        """Begin the next sample of a group in which one has failed for good, if the group has one that has not."""
        self._add(group, min(1, self.members - len(group.members)))

    def have_answered(self, group: Group) -> bool:
        """Whether the results of those that began are in, and the rest has not begun."""
        return group.done == self.count and len(group.members) < self.members

    def _add(self, group: Group, count: int) -> None:
        for _ in range(count):
            sample = Sample(group.group_id * self.members + len(group.members), group)
            group.members.append(sample)
            self.tickets.ledger.issue(sample)
            self.tickets.enqueue(sample)


class Duration:
    """How long a run is: in steps, and in seconds where it ends by time.

    Time begins with the first version, and anew when the evaluation of that version has ended: that is no training.

    `steps`: the version at which the run ends; it becomes less when its time is over.
    """

    def __init__(self, steps: int, seconds: float | None) -> None:
        """seconds: None: the steps alone count."""
        self.steps = steps
        self._seconds = seconds
        self.spent_s = 0.0
        """The time of training up to the newest batch, with that of the sittings before."""
        self._before_s = 0.0
        self._first = -1  # version
        self._since = 0.0

    def go_on(self, spent_s: float) -> None:
        """Take up the time of the sittings before: what depends on its share does not begin anew."""
        self.spent_s = self._before_s = spent_s

    def begin(self, version: int, now: float) -> None:
        self._first = version
        self._since = now

    def evaluated(self, version: int, now: float) -> None:
        if version == self._first:
            self._since = now

    def assembled(self, step: int, now: float) -> float:
        """The share of the time that is over with the batch of this step; from 1 on it is the last one."""
        self.spent_s = self._before_s + max(0.0, now - self._since)
        share = 0.0 if self._seconds is None else self.spent_s / self._seconds
        if share >= 1:
            self.steps = step + 1
        return share
