"""What was trained since the newest checkpoint, and how it is taken back.

A learner that was killed trains these batches again. If version m comes out otherwise than before, it is published in
a new timeline, and whatever holds tokens of the earlier version m or of later ones ends `stale`: all batches from step
m on, trained or not, and open groups. Groups that are complete and wholly older stay. So what counts as trained is what
the weights have seen, and no sample is trained twice.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from rl.wire.messages import Version
from rollout.broker.actions import EpisodeOutcome, GroupRecord
from rollout.broker.batches import Batches
from rollout.broker.evaluation import Evaluations
from rollout.broker.records import NAMES, Group, Phase, State
from rollout.broker.statistics import Tally


@dataclass(slots=True)
class _Trained:
    groups: list[Group]
    outcomes: list[EpisodeOutcome]
    staleness: dict[int, int]  # of everything trained before this step
    kept: Tally


class History:
    def __init__(self, batches: Batches, evaluations: Evaluations) -> None:
        self._batches = batches
        self._evaluations = evaluations
        self._groups = batches.groups
        self._steps: dict[int, _Trained] = {}

    def trained(self, now: float) -> list[GroupRecord]:
        """The learner has published the version that batch n made."""
        n = self._groups.n
        batch = self._batches.untrained[n]
        outcomes = [member.outcome for group in batch for member in group.members if member.outcome is not None]
        stats = self._groups.stats
        self._steps[n] = _Trained(batch, outcomes, dict(stats.staleness), copy(stats.kept))
        return self._batches.trained(now)

    def forget(self, before: int) -> None:
        """A checkpoint has what the steps before this one made."""
        self._steps = {step: trained for step, trained in self._steps.items() if step >= before}

    @property
    def since(self) -> int:
        """The oldest version to which it reaches back."""
        return min(self._steps, default=self._groups.n)

    def roll_back(self, version: Version, now: float) -> list[GroupRecord]:
        """Version n, and whatever came of it, never was: `version` has its number, not older than `since`."""
        n = version.n
        for step in reversed(range(n, self._groups.n)):
            self._take_back(self._steps.pop(step))

        groups = self._groups
        stale = [group for group in groups.open.values() if not _is_older(group, n)]
        records = [record for group in stale for record in groups.end(group, State.STALE, now)]
        self._batches.clear()
        groups.advance_to(n, n)
        groups.tickets.begin(version.timeline)
        self._evaluations.roll_back(version)
        return records

    def _take_back(self, step: _Trained) -> None:
        groups = self._groups
        groups.stats.staleness = step.staleness
        groups.stats.kept = step.kept
        for outcome in step.outcomes:
            groups.stats.cut_finished(NAMES[State.STALE], outcome)

        for group in step.groups:
            for member in group.members:
                if member.state is State.TRAINED:
                    groups.tickets.ledger.move(member, State.STALE)
            groups.tasks.put_back(group.task)


def _is_older(group: Group, n: int) -> bool:
    """Whether it is complete, and no token of it is of version n or later."""
    if group.phase is not Phase.READY:
        return False
    outcomes = [member.outcome for member in group.accepted() if member.outcome is not None]
    return all(outcome.newest_version is not None and outcome.newest_version < n for outcome in outcomes)
