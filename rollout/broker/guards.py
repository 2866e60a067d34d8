"""What batches and evaluations say about judges, tasks, samplers and processes (docs/silent-faults.md).

The module is pure. An environment takes part by two names in its `info`. `success_<type>` is 1 or 0 and names the type
of its task; without one a member of a mixture is a type. `invalid_share` is the share of an episode's answers that it
could not use. Its server adds `textless_tokens`, the sampled tokens that stand for no text.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, median
from zlib import crc32

from rl.config.section import split_named
from rl.observe.alarms import Alarms
from rl.wire.messages import NO_OPINION, Trajectory
from rollout.broker.actions import BatchSample, EmitBatch, EvalReport, GroupRecord
from rollout.broker.core import BrokerCore
from rollout.broker.records import NAMES, State
from rollout.broker.rules import Rules
from rollout.broker.statistics import Statistics

_FAILED = NAMES[State.FAILED]
_LEAST_GROUPS = 8
_LEAST_SAMPLES = 16
TYPE = "success_"
INVALID = "invalid_share"
TEXTLESS = "textless_tokens"
_FIRST_SAMPLES = 64  # whose share of invalid answers later ones are compared with, and as many later ones
_SAMPLES_OF_A_GROUP = 8  # so many count as one group of a type
_EXPECTED = 10  # successes that did not come, by the rate before them
_LEAST_CUT = 32  # episodes
_REWARDS = 500  # that are looked at
_STALLS = 4  # of 1 + alpha batches each, that are looked at
_LEAST_BATCHES = 6
_LEAST_TURNS = 16  # of a process
_MOST_TURNS = 64  # of a process in one batch; more would say no more


class BatchGuards:
    """The guards of one run hear every batch and every evaluation, in order."""

    def __init__(self, rules: Rules, alarms: Alarms) -> None:
        self._alarms = alarms
        self._check = alarms.check
        self._shuffled = split_named(rules.curriculum)[0] == "shuffled"
        self._trained: deque[tuple[int, int]] = deque(maxlen=rules.train_tasks // 4)  # step and task of the last groups
        # A batch at least, and of small batches so many that what all of them share says something.
        groups = max(rules.groups_per_batch, _LEAST_GROUPS)
        samples = max(rules.groups_per_batch * rules.group_size, _LEAST_SAMPLES)
        self._constant: deque[bool] = deque(maxlen=groups)
        self._equal: deque[bool] = deque(maxlen=groups)
        self._passed: deque[bool] = deque(maxlen=samples)
        self._failed_tasks: deque[bool] = deque(maxlen=samples)
        self._unknown: deque[bool] = deque(maxlen=samples)

        self._task_guards = TaskGuards(alarms)
        self._rewards = RewardGuard(alarms)
        self._outliers = Outliers(alarms, rules.alpha)
        self._ended = 0  # attempts, before this batch
        self._failed = 0

    def restored(self, core: BrokerCore) -> None:
        """Go on after a journal: every group that was trained had drawn a task."""
        groups = core.ledger.samples[State.TRAINED] // core.rules.group_size - core.groups.tasks.trained_before
        drawn = core.groups.tasks.source.state() if self._shuffled else groups
        self._check("data-repeated", drawn < groups, f"{drawn} tasks drawn for {groups} groups that were trained")

    def batch(self, batch: EmitBatch, stats: Statistics) -> None:
        """stats: of the run so far."""
        groups: dict[int, list[BatchSample]] = {}
        for sample in batch.samples:
            groups.setdefault(sample.group_id, []).append(sample)

        self._judge(batch)
        several = [members for members in groups.values() if len(members) > 1]
        rewards = [[each.outcome.reward for each in members if not each.outcome.unrewarded] for members in several]
        self._constant += [len(set(known)) == 1 for known in rewards if len(known) > 1]
        self._equal += [len({_content(member) for member in members}) == 1 for members in several]
        count = len(self._constant)
        self._check("constant-groups", _all(self._constant), f"the last {count} groups, up to step {batch.step}")
        found = f"members of the last {count} groups are equal, up to step {batch.step}"
        self._check("no-diversity", _all(self._equal), found)

        starts = {_start(sample) for sample in batch.samples}
        double = len(groups) > 1 and len(starts) == 1 and len(set(*starts)) == 1
        self._check("double-start", double, f"every prompt of step {batch.step} begins with the ids {starts}")
        self._tasks(batch.step, [members[0].task_index for members in groups.values()])
        failed = stats.cut[_FAILED].running if _FAILED in stats.cut else 0
        self._failures(batch.step, stats.issued.episodes + failed, failed)

        stale = batch.metrics.get("staleness/mean", 0.0)
        found = f"{stale:.1f} versions on average in step {batch.step}"
        self._alarms.check_above("old-samples", "versions", stale, found)
        self._task_guards.batch(batch.step, list(groups.values()), stats)
        self._outliers.batch(batch.step, batch.samples)

    def rewarded(self, results: Iterable[str]) -> None:
        """Results have been taken; of each, why its reward is not known, or the empty string."""
        for unrewarded in results:
            self._rewards.add(unrewarded)

    def ended(self, record: GroupRecord) -> None:
        """A group has ended, in whatever way."""
        failed = record.end == _FAILED
        self._check("failing-task", failed, f"task {record.task_index} failed in every attempt at a sample")

    def evaluated(self, report: EvalReport) -> None:
        attempted = report.tasks * report.samples
        share = report.failed / attempted
        found = f"{share:.0%} of {attempted} held-out episodes at version {report.version.n} have no answer"
        self._alarms.check_above("eval-incomplete", "share", share, found)

    def _judge(self, batch: EmitBatch) -> None:
        outcomes = [sample.outcome for sample in batch.samples]
        judged = [outcome for outcome in outcomes if not outcome.unrewarded]
        self._passed += [outcome.success >= 1 for outcome in judged]
        self._failed_tasks += [outcome.success <= 0 for outcome in judged]
        self._unknown += [bool(outcome.unrewarded) for outcome in outcomes]
        found = f"the last {len(self._passed)} samples, up to step {batch.step}"
        self._check("judge-always", _all(self._passed), found)
        if unknown := _all(self._unknown):
            found = f"no reward of the last {len(self._unknown)} samples is known, up to step {batch.step}"
        self._check("judge-never", unknown or _all(self._failed_tasks), found)

        cut = sum(outcome.payload is not None and outcome.payload.stop_reason != "done" for outcome in outcomes)
        share = cut / len(outcomes)
        self._alarms.check_above("truncated", "share", share, f"{share:.0%} of the episodes of step {batch.step}")

    def _tasks(self, step: int, tasks: list[int]) -> None:
        """Check the tasks of a seeded order: a task comes again only after the others, or where its step was taken
        back."""
        while self._trained and self._trained[-1][0] >= step:
            self._trained.pop()
        before = {task for _, task in self._trained}
        again = sum(task in before for task in tasks) / len(tasks)
        repeated = self._shuffled and again > self._alarms.limit("data-repeated", "share")
        self._check("data-repeated", repeated, f"{again:.0%} of the tasks of step {step} were trained just before")
        self._trained.extend((step, task) for task in tasks)

    def _failures(self, step: int, ended: int, failed: int) -> None:
        """ended: attempts since the start of the run, `failed` of them without a result."""
        attempts = ended - self._ended
        share = (failed - self._failed) / max(1, attempts)
        found = f"{share:.0%} of {attempts} attempts before step {step}"
        self._alarms.check_above("failing-episodes", "share", share, found)
        self._ended = ended
        self._failed = failed


def _all(recent: deque[bool]) -> bool:
    """Whether all are true of a window that is full."""
    return len(recent) == recent.maxlen and all(recent)


def _content(sample: BatchSample) -> int:
    """A number of the sampled ids; its own for a sample without a payload."""
    trajectory = sample.outcome.payload
    if trajectory is None:
        return -1 - sample.sample_id

    content = 0
    for sequence in trajectory.sequences:
        content = crc32(sequence.token_ids.data, content)
    return content


def _start(sample: BatchSample) -> tuple[int, ...]:
    """The first two ids of its prompt; its own number for a sample without a payload."""
    trajectory = sample.outcome.payload
    return (sample.sample_id, -1) if trajectory is None else tuple(trajectory.sequences[0].token_ids[:2].tolist())


class RewardGuard:
    """How many of the last rewards have failed; told at most once in as many results."""

    def __init__(self, alarms: Alarms) -> None:
        self._alarms = alarms
        self._recent: deque[bool] = deque(maxlen=_REWARDS)
        self._first = ""
        self._count = 0
        self._silent_until = 0

    def add(self, unrewarded: str) -> None:
        failed = unrewarded not in ("", NO_OPINION)
        self._count += 1
        self._recent.append(failed)
        if not failed:
            return

        self._first = self._first or unrewarded
        count = sum(self._recent)
        if count > self._alarms.limit("reward-failed", "share") * _REWARDS and self._count > self._silent_until:
            self._silent_until = self._count + _REWARDS
            found = f"{count} of the last {len(self._recent)} rewards; the first failure: {self._first}"
            self._alarms.check("reward-failed", True, found)


@dataclass
class _Type:
    """One type of tasks: samples and successes until the last success, and what has failed since."""

    samples: int = 0
    successes: int = 0
    groups_since: float = 0.0
    samples_since: int = 0

    def add(self, succeeded: list[bool]) -> None:
        """Add one group."""
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
    """What batches say about types of tasks, about the form of answers, and about what redundancy cuts.

    They are those of one run, and hear every batch, in order.
    """

    def __init__(self, alarms: Alarms) -> None:
        self._alarms = alarms
        self._check = alarms.check
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
        self._check_text(step, samples)
        self._check_length(step, samples)
        self._check_cut(step, stats)

    def _count(self, members: list[BatchSample]) -> None:
        """A task whose reward is not known has not succeeded: a judge may be silent about one type alone."""
        by_type: dict[str, list[bool]] = {}
        for outcome in (each.outcome for each in members):
            types = {name: value for name, value in outcome.info.items() if name.startswith(TYPE)}
            if not types and outcome.label:
                types = {outcome.label: outcome.success}
            for name, value in types.items():
                solved = value > 0 and not outcome.unrewarded
                by_type.setdefault(name.removeprefix(TYPE), []).append(solved)

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
        self._check("task-type-never", bool(never) and some_succeed, f"{counts}, up to step {step}")

    def _check_form(self, step: int, samples: list[BatchSample]) -> None:
        shares = [sample.outcome.info[INVALID] for sample in samples if INVALID in sample.outcome.info]
        if not shares:
            return

        share = fmean(shares)
        self._alarms.check_above("unreadable", "share", share, f"{share:.0%} of the answers of step {step}")

        room = _FIRST_SAMPLES - len(self._first)
        self._first += shares[:room]
        self._last += shares[room:] if room > 0 else shares
        if len(self._last) == _FIRST_SAMPLES:
            first = fmean(self._first)
            last = fmean(self._last)
            found = f"{first:.0%} of the first answers, {last:.0%} of those up to step {step}"
            self._alarms.check_above("invalid-actions", "rise", last - first, found)

    def _check_text(self, step: int, samples: list[BatchSample]) -> None:
        textless = sum(sample.outcome.info.get(TEXTLESS, 0.0) for sample in samples)
        sampled = sum(sample.outcome.length for sample in samples)
        wrong = textless > self._alarms.limit("ids-without-text", "share") * sampled
        found = f"{textless:.0f} of {sampled} sampled tokens of step {step} stand for no text"
        self._alarms.check("ids-without-text", wrong, found)

    def _check_length(self, step: int, samples: list[BatchSample]) -> None:
        played = [sample.outcome.payload for sample in samples if sample.outcome.payload is not None]
        ends = [turn.finish_reason for trajectory in played for turn in trajectory.turns]
        share = ends.count("length") / max(1, len(ends))
        self._alarms.check_above("answers-cut", "share", share, f"{share:.0%} of those of step {step}")

    def _check_cut(self, step: int, stats: Statistics) -> None:
        """Compare the lengths of what was cut. Those cut while they ran count with what they had by then: longer ones
        are certain to be missed."""
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
        self._check("long-episodes-cut", wrong, found)


@dataclass
class _Turns:
    """The turns of one batch, by process."""

    servers: dict[int, list[float]] = field(default_factory=dict)  # seconds of a turn
    generators: dict[int, list[float]] = field(default_factory=dict)  # seconds of a token
    tokens: list[float] = field(default_factory=list)  # of a turn

    def add(self, trajectory: Trajectory) -> None:
        for turn in trajectory.turns:
            tokens = max(1, turn.end - turn.start)
            _keep(self.tokens, tokens)
            _keep(self.servers.setdefault(trajectory.server, []), turn.env_s)
            _keep(self.generators.setdefault(turn.generator, []), turn.generate_s / tokens)


class Outliers:
    """One environment server or generator that is much slower than its like, by the turns of trained episodes.

    A busy machine makes any process stand still for a while, and what stands still delays all that it holds: up to
    1 + alpha batches. So a process counts as slow only if even the fastest quarter of its turns is slow. That is judged
    over so many batches that one or two such stalls are less than three quarters of them.
    """

    def __init__(self, alarms: Alarms, alpha: float) -> None:
        self._alarms = alarms
        batches = _STALLS * (1 + math.ceil(alpha))
        self._least_batches = max(_LEAST_BATCHES, 3 * batches // 4)
        self._batches: deque[_Turns] = deque(maxlen=max(_LEAST_BATCHES, batches))

    def batch(self, step: int, samples: list[BatchSample]) -> None:
        turns = _Turns()
        for sample in samples:
            if sample.outcome.payload is not None:
                turns.add(sample.outcome.payload)

        self._batches.append(turns)
        tokens = [count for each in self._batches for count in each.tokens]
        if len(self._batches) < self._least_batches or not tokens:
            return

        self._compare("slow-server", "env_server", [each.servers for each in self._batches], "turn", step, 1)
        size = median(tokens)
        self._compare("slow-generator", "generator", [each.generators for each in self._batches], "token", step, size)

    def _compare(
        self, name: str, role: str, batches: list[dict[int, list[float]]], unit: str, step: int, size: float
    ) -> None:
        """batches: seconds of a unit by process, of each; size: units of a turn."""
        seconds: dict[int, list[float]] = {}
        for each in batches:
            for index, values in each.items():
                seconds.setdefault(index, []).extend(values)
        fastest = {index: _quarter(values) for index, values in seconds.items() if len(values) >= _LEAST_TURNS}
        if len(fastest) < 2:
            return

        slowest = max(fastest, key=lambda index: fastest[index])
        others = median([value for index in fastest if index != slowest for value in seconds[index]])
        own = fastest[slowest]
        least_s = self._alarms.limit(name, "s") / size
        wrong = own > self._alarms.limit(name, "times") * others and own - others > least_s
        found = (
            f"three in four turns of {role}.{slowest} took {own:.3g} s or more for a {unit}, half of the others' "
            f"{others:.3g} s at most, in {len(batches)} batches up to step {step}"
        )
        self._alarms.check(name, wrong, found)


def _keep(values: list[float], value: float) -> None:
    if len(values) < _MOST_TURNS:
        values.append(value)


def _quarter(values: list[float]) -> float:
    """What a quarter of them is below."""
    return sorted(values)[len(values) // 4]
