"""What the broker keeps of a group, its samples and their tickets. Who changes what: `Ledger` a sample's state and
tokens, `Tickets` its attempts, `Groups` a group's version and phase."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto

from msgspec.structs import replace

from rl.wire.messages import Ticket
from rollout.broker.actions import BatchSample, EpisodeOutcome, GroupRecord
from rollout.broker.tasks import DrawnTask


class State(IntEnum):
    QUEUED = 0
    RUNNING = 1
    WAITING = 2
    BATCHED = 3
    TRAINED = 4
    STALE = 5
    FILTERED = 6
    SETTLED = 7
    REDUNDANT = 8
    FAILED = 9


NAMES = tuple(state.name.lower() for state in State)
ENDS = frozenset({State.TRAINED, State.STALE, State.FILTERED, State.REDUNDANT, State.FAILED, State.SETTLED})
_LIVE = (State.RUNNING, State.WAITING)


class Phase(Enum):
    UNFINISHED = auto()  # some of its G results are missing
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
    outcome: EpisodeOutcome | None = None

    def take_payload(self) -> BatchSample:
        """The payload for its batch; the outcome stays without it."""
        group = self.group
        outcome = self.outcome
        assert outcome is not None and group.version is not None
        self.outcome = replace(outcome, payload=None)
        return BatchSample(self.sample_id, group.group_id, group.task.task_index, group.version, outcome)

    def running(self) -> list[Attempt]:
        """The attempts that it waits for."""
        if self.state is not State.RUNNING:
            return []
        return [attempt for attempt in (self.attempt, self.spare) if attempt is not None and attempt.live]


@dataclass(slots=True, eq=False)
class Attempt:
    """One ticket."""

    ticket_id: int
    sample: Sample
    server: int
    ticket: Ticket
    issued_at: float
    spare: bool = False  # a copy that is not, or no longer, the sample's current attempt
    version: int | None = None  # v(sample), as far as is known
    tokens: int = 0
    claimed: int = -1  # tokens by its trajectory's own count; -1: none came
    by_claim: bool = False  # reports of its tokens may be lost: its trajectory's count stands
    live: bool = True  # until its one end
    cut: str = ""  # the end for which it was revoked, or `failed`
    failure: str = ""  # why it failed

    @property
    def is_running(self) -> bool:
        """Whether its sample waits for it: for the current attempt, or for a spare copy."""
        sample = self.sample
        return sample.state is State.RUNNING and (sample.attempt is self or sample.spare is self)


@dataclass(slots=True, eq=False)
class Group:
    """G + g samples of one task, or the first of them: the rest joins when it is known to be worth it."""

    group_id: int  # also its issue number
    task: DrawnTask
    order: float  # of its issue, lower first
    opened_at: float
    alive: int  # members that have not failed for good
    members: list[Sample] = field(default_factory=list)
    phase: Phase = Phase.UNFINISHED
    version: int | None = None  # v(group): the smallest version of its live members
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

    def rewarded(self) -> list[EpisodeOutcome]:
        """The results whose reward is known."""
        outcomes = [member.outcome for member in self.members if member.outcome is not None]
        return [outcome for outcome in outcomes if not outcome.unrewarded]

    def record(self, end: State, now: float) -> GroupRecord:
        outcomes = self.rewarded()
        return GroupRecord(
            group_id=self.group_id,
            task_index=self.task.task_index,
            end=NAMES[end],
            version=self.version,
            cut_offs=self.task.cut_offs,
            rewards=[outcome.reward for outcome in outcomes],
            seconds=now - self.opened_at,
            success=sum(outcome.success for outcome in outcomes) / len(outcomes) if outcomes else None,
        )
