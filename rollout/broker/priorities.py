"""Which group goes first: at issue, and in a batch (F4 decides what is fresh enough, a priority only the order).

A custom priority is a class with these two methods, named by `rollout.priority=package.module:Name`. Retries of failed
members go before anything new whatever it says, and a group that waits for its turn too long still expires (F3).
"""

from __future__ import annotations

from typing import Protocol

from rl.core.plugins import make
from rollout.broker.tasks import Assignment


class Priority(Protocol):
    """Lower goes first; ties go by issue number."""

    def issue(self, assignment: Assignment) -> float:
        """Of a group that is about to be queued."""
        ...

    def consume(self, version: int, assignment: Assignment) -> float:
        """Of a finished group with v(group) = `version`."""
        ...


class Oldest:
    """F4's own order: by (v, issue number). Every group comes to its turn, so nothing fresh enough is wasted."""

    def issue(self, assignment: Assignment) -> float:
        return 0.0

    def consume(self, version: int, assignment: Assignment) -> float:
        return version


class Freshest:
    """Lowest staleness: the newest finished groups first. What it leaves behind expires: more waste and more bias
    against slow tasks than `oldest`, which a low `hold_patience` bounds for groups that are unfinished."""

    def issue(self, assignment: Assignment) -> float:
        return 0.0

    def consume(self, version: int, assignment: Assignment) -> float:
        return -version


_KNOWN = {"oldest": f"{__name__}:Oldest", "freshest": f"{__name__}:Freshest"}


def load_priority(name: str) -> Priority:
    """Raises ConfigError."""
    priority: Priority = make("rollout.priority", name, _KNOWN)
    return priority
