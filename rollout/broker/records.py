"""What the broker keeps of a group, its samples and their tickets. Who changes what: `Ledger` a sample's state and
tokens, `Tickets` its attempts, `Groups` a group's version and phase."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto

from rollout.broker.actions import Outcome
from rollout.broker.tasks import Assignment


class State(IntEnum):
    QUEUED = 0
    RUNNING = 1
    WAITING = 2
    BATCHED = 3
    TRAINED = 4
    STALE = 5
    FILTERED = 6
    REDUNDANT = 7
    FAILED = 8


NAMES = tuple(state.name.lower() for state in State)
ENDS = frozenset({State.TRAINED, State.STALE, State.FILTERED, State.REDUNDANT, State.FAILED})
_LIVE = (State.RUNNING, State.WAITING)


class Phase(Enum):
    OPEN = auto()  # some of its G results are missing
    READY = auto()  # G results, not in a batch
    BATCHED = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Sample:
    """A place in a group. `attempt` is its current ticket, `spare` a second copy of it on another server."""

    sample_id: int
    group: Group
    state: State = State.QUEUED
    attempt: Attempt | None = None
    spare: Attempt | None = None
    failures: int = 0
    outcome: Outcome | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    """One ticket."""

    ticket_id: int
    sample: Sample
    server: int
    stamp: int  # the version at which it went out
    issued_at: float
    spare: bool = False  # a copy that is not, or no longer, the sample's current attempt
    version: int | None = None  # of its first token
    tokens: int = 0
    claimed: int = -1  # tokens by its trajectory's own count; -1: none came
    live: bool = True  # until its one end
    cut: str = ""  # the end for which it was revoked, or `failed`

    @property
    def is_running(self) -> bool:
        """Its sample waits for it: for the current attempt, or for a spare copy."""
        sample = self.sample
        return sample.state is State.RUNNING and (sample.attempt is self or sample.spare is self)


@dataclass(slots=True, eq=False)
class Group:
    """G + g samples of one task."""

    group_id: int  # also its issue number
    assignment: Assignment
    rank: float  # issue priority, lower first
    opened_at: float
    alive: int  # members that have not failed for good
    members: list[Sample] = field(default_factory=list)
    phase: Phase = Phase.OPEN
    version: int | None = None  # v(group): the smallest first-token version of its live members
    done: int = 0  # accepted results

    def live_version(self) -> int | None:
        versions = [
            member.attempt.version
            for member in self.members
            if member.state in _LIVE and member.attempt is not None and member.attempt.version is not None
        ]
        return min(versions) if versions else None

    def accepted(self) -> list[Sample]:
        return [member for member in self.members if member.outcome is not None]
