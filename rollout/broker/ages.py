"""Unbatched groups by v(group). Versions that matter span S + 1 values, so a walk over the versions is cheap, and each
group is touched only when it changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rollout.broker.records import Group, Phase


class Ages:
    """`patience` is P: how often a task may be cut off before batches wait for it (F5)."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._by_version: dict[int, dict[int, Group]] = {}
        self._protected: Counter[int] = Counter()  # unfinished groups that a batch waits for, by version

    def add(self, group: Group) -> None:
        if group.version is not None:
            self._by_version.setdefault(group.version, {})[group.group_id] = group
            self._count(group, 1)

    def remove(self, group: Group) -> None:
        """Before its version or phase changes; without effect on a group that is not here."""
        if group.version is None or group.phase not in (Phase.UNFINISHED, Phase.READY):
            return
        groups = self._by_version[group.version]
        del groups[group.group_id]
        if not groups:
            del self._by_version[group.version]
        self._count(group, -1)

    def older_than(self, version: int) -> list[Group]:
        """In the order of their issue."""
        found = [group for v, groups in self._by_version.items() if v < version for group in groups.values()]
        return sorted(found, key=lambda group: group.group_id)

    def unfinished(self) -> Iterator[Group]:
        """Those with a version that no batch waits for, oldest v first."""
        for version in sorted(self._by_version):
            for group in list(self._by_version[version].values()):
                if group.phase is Phase.UNFINISHED and not self.is_protected(group):
                    yield group

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
