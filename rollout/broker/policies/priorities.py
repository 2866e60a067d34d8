"""Orders of groups by name. A custom one is a class like these, named by `rollout.priority=package.module:Name`."""

from __future__ import annotations

from rollout.broker.tasks import DrawnTask


class Oldest:
    """F4's own order, by v. Every group comes to its turn, so nothing fresh enough is wasted."""

    def issue(self, task: DrawnTask) -> float:
        return 0.0

    def consume(self, version: int, task: DrawnTask) -> float:
        return version


class Freshest(Oldest):
    """Lowest staleness: the newest finished groups first. What it leaves behind expires: more waste and more bias
    against slow tasks than `oldest`, which a low `hold_patience` bounds for groups that are unfinished."""

    def consume(self, version: int, task: DrawnTask) -> float:
        return -version
