"""Groups by version: expiry (F3), the order of assembly (F4) and whom a batch is held for (F5), without scans.

An unbatched group whose first token is known stands in the bucket of its version. Versions that
matter span S + 1 values, so walking the buckets' keys is cheap, and each group is touched only when it changes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from rollout.broker.records import Group, Phase
from rollout.broker.tasks import Assignment


class GroupBook:
    """Unbatched groups by version. A group counts as protected when it was cut off `patience` times or more."""

    def __init__(self, patience: float, order: Callable[[int, Assignment], float]) -> None:
        self.patience = patience
        self._order = order  # of consumption, by (v, assignment)
        self.ready = 0
        self._by_version: dict[int, dict[int, Group]] = {}
        self._protected: dict[int, int] = {}  # version -> OPEN groups that a batch waits for (F5)
        self._heap: list[tuple[float, int, Group]] = []  # READY groups by (priority, issue number); ended ones linger

    def set_version(self, group: Group, version: int | None) -> None:
        if version == group.version:
            return
        self._leave(group)
        group.version = version
        if version is not None:
            self._by_version.setdefault(version, {})[group.group_id] = group
            self._count_protected(group, 1)

    def set_ready(self, group: Group) -> None:
        """All G results are in: v(group) is final."""
        assert group.version is not None
        self._count_protected(group, -1)
        group.phase = Phase.READY
        self.ready += 1
        heapq.heappush(self._heap, (self._order(group.version, group.assignment), group.group_id, group))

    def drop(self, group: Group, phase: Phase) -> None:
        """The group is batched or ended: no bucket holds it any more."""
        self._leave(group)
        if group.phase is Phase.READY:
            self.ready -= 1
        group.phase = phase

    def older_than(self, floor: int) -> list[Group]:
        """Groups with v < floor, by issue number."""
        versions = [version for version in self._by_version if version < floor]
        return sorted(
            (group for version in versions for group in self._by_version[version].values()),
            key=lambda group: group.group_id,
        )

    def unfinished(self) -> Iterator[Group]:
        """Open groups that no batch would wait for, oldest v first."""
        for version in sorted(self._by_version):
            for group in list(self._by_version[version].values()):
                if group.phase is Phase.OPEN and group.assignment.attempts < self.patience:
                    yield group

    def held_for(self, oldest: int) -> int:
        """Unfinished protected groups that have v <= oldest."""
        return sum(count for version, count in self._protected.items() if version <= oldest)

    def take(self, count: int) -> list[Group]:
        """Remove the first `count` ready groups in the order of assembly (F4)."""
        taken: list[Group] = []
        while len(taken) < count:
            _, _, group = heapq.heappop(self._heap)
            if group.phase is Phase.READY:
                self.drop(group, Phase.BATCHED)
                taken.append(group)
        return taken

    def _leave(self, group: Group) -> None:
        if group.version is None or group.phase not in (Phase.OPEN, Phase.READY):
            return
        bucket = self._by_version[group.version]
        del bucket[group.group_id]
        if not bucket:
            del self._by_version[group.version]
        self._count_protected(group, -1)

    def _count_protected(self, group: Group, change: int) -> None:
        version = group.version
        if version is None or group.phase is not Phase.OPEN or group.assignment.attempts < self.patience:
            return
        count = self._protected.get(version, 0) + change
        if count:
            self._protected[version] = count
        else:
            del self._protected[version]
