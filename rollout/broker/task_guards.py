"""What batches say about types of tasks, about the form of answers, and about what redundancy cuts. Pure.

An environment takes part by two names in its `info`: `success_<type>` is 1 or 0 and names the type of its task,
`invalid_share` is the share of an episode's answers that it could not use.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import fmean

from rl.observe.alarms import Alarms
from rollout.broker.actions import BatchSample, GroupRecord
from rollout.broker.records import NAMES, State
from rollout.broker.statistics import Statistics

TYPE = "success_"
INVALID = "invalid_share"
_FIRST_SAMPLES = 64  # whose share of invalid answers later ones are compared with, and as many later ones
_SAMPLES_OF_A_GROUP = 8  # so many count as one group of a type
_EXPECTED = 10  # successes that did not come, by the rate before them
_LEAST_CUT = 32  # episodes


@dataclass
class _Type:
    """One type of tasks: samples and successes until the last success, and what has failed since."""

    samples: int = 0
    successes: int = 0
    groups_since: float = 0.0
    samples_since: int = 0

    def add(self, succeeded: list[bool]) -> None:
        """One group."""
        if any(succeeded):
            self.samples += self.samples_since + len(succeeded)
            self.successes += sum(succeeded)
            self.groups_since = 0.0
            self.samples_since = 0
            return

        self.groups_since += min(1.0, len(succeeded) / _SAMPLES_OF_A_GROUP)
        self.samples_since += len(succeeded)

    @property
    def missing(self) -> float:
        """Successes that the failures since the last one lack, by the rate before; 0 where none ever came."""
        return self.samples_since * self.successes / self.samples if self.samples else 0.0


class TaskGuards:
    """Of one run: every batch and every group's end, in order."""

    def __init__(self, alarms: Alarms) -> None:
        self._alarms = alarms
        self._types: dict[str, _Type] = {}
        self._first: list[float] = []  # shares of invalid answers
        self._last: deque[float] = deque(maxlen=_FIRST_SAMPLES)

    def batch(self, step: int, groups: list[list[BatchSample]], stats: Statistics) -> None:
        """groups: members of each; stats: of the run so far."""
        for members in groups:
            self._count(members)
        samples = [sample for members in groups for sample in members]
        self._check_types(step)
        self._check_form(step, samples)
        self._check_length(step, samples)
        self._check_cut(step, stats)

    def ended(self, record: GroupRecord) -> None:
        failed = record.end == NAMES[State.FAILED]
        self._alarms.check("failing-task", failed, f"task {record.task_index} failed in every attempt at a sample")

    def _count(self, members: list[BatchSample]) -> None:
        by_type: dict[str, list[bool]] = {}
        for sample in members:
            for name, value in sample.outcome.info.items():
                if name.startswith(TYPE):
                    by_type.setdefault(name.removeprefix(TYPE), []).append(value > 0)

        for name, succeeded in by_type.items():
            self._types.setdefault(name, _Type()).add(succeeded)

    def _check_types(self, step: int) -> None:
        limit = self._alarms.limit("task-type-never", "groups")
        some_succeed = any(each.successes for each in self._types.values())
        never = [
            name
            for name, each in self._types.items()
            if each.groups_since >= limit and (not each.successes or each.missing >= _EXPECTED)
        ]
        counts = ", ".join(f"{name} (its last {self._types[name].samples_since} samples)" for name in never)
        self._alarms.check("task-type-never", bool(never) and some_succeed, f"{counts}, up to step {step}")

    def _check_form(self, step: int, samples: list[BatchSample]) -> None:
        shares = [sample.outcome.info[INVALID] for sample in samples if INVALID in sample.outcome.info]
        if not shares:
            return

        share = fmean(shares)
        unreadable = share > self._alarms.limit("unreadable", "share")
        self._alarms.check("unreadable", unreadable, f"{share:.0%} of the answers of step {step}")

        room = _FIRST_SAMPLES - len(self._first)
        self._first += shares[:room]
        self._last += shares[room:] if room > 0 else shares
        if len(self._last) == _FIRST_SAMPLES:
            first = fmean(self._first)
            last = fmean(self._last)
            found = f"{first:.0%} of the first answers, {last:.0%} of those up to step {step}"
            risen = last - first > self._alarms.limit("invalid-actions", "rise")
            self._alarms.check("invalid-actions", risen, found)

    def _check_length(self, step: int, samples: list[BatchSample]) -> None:
        played = [sample.outcome.payload for sample in samples if sample.outcome.payload is not None]
        ends = [turn.finish_reason for trajectory in played for turn in trajectory.turns]
        share = ends.count("length") / max(1, len(ends))
        limit = self._alarms.limit("answers-cut", "share")
        self._alarms.check("answers-cut", share > limit, f"{share:.0%} of those of step {step}")

    def _check_cut(self, step: int, stats: Statistics) -> None:
        """Those cut while they ran count with what they had by then: longer ones are certain to be missed."""
        cut = stats.cut.get(NAMES[State.REDUNDANT])
        kept = stats.kept
        if cut is None or not kept.episodes or cut.finished.episodes + cut.running < _LEAST_CUT:
            return

        count = cut.finished.episodes + cut.running
        told = cut.finished.episodes + cut.told
        lengths = (cut.finished.length + cut.tokens) / count, kept.length / kept.episodes
        turns = (cut.finished.turns + cut.turns) / max(1, told), kept.turns / kept.episodes

        longer = self._alarms.limit("long-episodes-cut", "times")
        wrong = lengths[0] > longer * lengths[1] or turns[0] > longer * turns[1]
        found = (
            f"{count} cut episodes had {lengths[0]:.0f} tokens and {turns[0]:.1f} turns by then, trained ones "
            f"have {lengths[1]:.0f} and {turns[1]:.1f}, up to step {step}"
        )
        self._alarms.check("long-episodes-cut", wrong, found)
