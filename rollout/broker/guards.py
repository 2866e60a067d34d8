"""What a batch and an evaluation say about judges, tasks and samplers (docs/silent-faults.md). Pure, as the core is."""

from __future__ import annotations

from collections import deque
from zlib import crc32

from rl.observe.alarms import Alarms
from rollout.broker.actions import BatchSample, EmitBatch, EvalReport, GroupRecord
from rollout.broker.core import BrokerCore
from rollout.broker.outliers import Outliers
from rollout.broker.records import NAMES, State
from rollout.broker.rules import Rules
from rollout.broker.statistics import Statistics
from rollout.broker.task_guards import TaskGuards

_FAILED = NAMES[State.FAILED]
_LEAST_GROUPS = 8
_LEAST_SAMPLES = 16


class BatchGuards:
    """Of one run: every batch and every evaluation, in order."""

    def __init__(self, rules: Rules, alarms: Alarms) -> None:
        self._alarms = alarms
        self._shuffled = rules.curriculum == "shuffled"
        self._trained: deque[int] = deque(maxlen=rules.train_tasks // 4)  # tasks of the last groups
        # A batch at least, and of small batches so many that what all of them share says something.
        groups = max(rules.groups_per_batch, _LEAST_GROUPS)
        samples = max(rules.groups_per_batch * rules.group_size, _LEAST_SAMPLES)
        self._constant: deque[bool] = deque(maxlen=groups)
        self._equal: deque[bool] = deque(maxlen=groups)
        self._passed: deque[bool] = deque(maxlen=samples)
        self._failed_tasks: deque[bool] = deque(maxlen=samples)

        self._task_guards = TaskGuards(alarms)
        self._outliers = Outliers(alarms, rules.alpha)
        self._ended = 0  # attempts, before this batch
        self._failed = 0

    def restored(self, core: BrokerCore) -> None:
        """After a journal: every group that was trained had drawn a task."""
        groups = core.ledger.samples[State.TRAINED] // core.rules.group_size
        drawn = core.groups.tasks.source.snapshot() if self._shuffled else groups
        self._alarms.check(
            "data-repeated", drawn < groups, f"{drawn} tasks drawn for {groups} groups that were trained"
        )

    def batch(self, batch: EmitBatch, stats: Statistics) -> None:
        """stats: of the run so far."""
        groups: dict[int, list[BatchSample]] = {}
        for sample in batch.samples:
            groups.setdefault(sample.group_id, []).append(sample)

        self._judge(batch)
        several = [members for members in groups.values() if len(members) > 1]
        self._constant += [len({member.outcome.reward for member in members}) == 1 for members in several]
        self._equal += [len({_content(member) for member in members}) == 1 for members in several]
        count = len(self._constant)
        self._alarms.check("constant-groups", _all(self._constant), f"the last {count} groups, up to step {batch.step}")
        found = f"members of the last {count} groups are equal, up to step {batch.step}"
        self._alarms.check("no-diversity", _all(self._equal), found)

        starts = {_start(sample) for sample in batch.samples}
        double = len(groups) > 1 and len(starts) == 1 and len(set(*starts)) == 1
        self._alarms.check("double-start", double, f"every prompt of step {batch.step} begins with the ids {starts}")
        self._tasks(batch.step, [members[0].task_index for members in groups.values()])
        failed = stats.cut[_FAILED].running if _FAILED in stats.cut else 0
        self._failures(batch.step, stats.issued.episodes + failed, failed)

        stale = batch.metrics.get("staleness/mean", 0.0)
        limit = self._alarms.limit("old-samples", "versions")
        self._alarms.check("old-samples", stale > limit, f"{stale:.1f} versions on average in step {batch.step}")
        self._task_guards.batch(batch.step, list(groups.values()), stats)
        self._outliers.batch(batch.step, batch.samples)

    def ended(self, record: GroupRecord) -> None:
        """A group has ended, in whatever way."""
        self._task_guards.ended(record)

    def evaluated(self, report: EvalReport) -> None:
        share = report.failed / report.tasks
        found = f"{share:.0%} of {report.tasks} tasks at version {report.version.n} have no answer"
        self._alarms.check("eval-incomplete", share > self._alarms.limit("eval-incomplete", "share"), found)

    def _judge(self, batch: EmitBatch) -> None:
        outcomes = [sample.outcome for sample in batch.samples]
        self._passed += [outcome.success >= 1 for outcome in outcomes]
        self._failed_tasks += [outcome.success <= 0 for outcome in outcomes]
        found = f"the last {len(self._passed)} samples, up to step {batch.step}"
        self._alarms.check("judge-always", _all(self._passed), found)
        self._alarms.check("judge-never", _all(self._failed_tasks), found)

        cut = sum(outcome.payload is not None and outcome.payload.stop_reason != "done" for outcome in outcomes)
        share = cut / len(outcomes)
        limit = self._alarms.limit("truncated", "share")
        self._alarms.check("truncated", share > limit, f"{share:.0%} of the episodes of step {batch.step}")

    def _tasks(self, step: int, tasks: list[int]) -> None:
        """With a seeded order: a task comes again only after the others."""
        again = sum(task in self._trained for task in tasks) / len(tasks)
        repeated = self._shuffled and again > self._alarms.limit("data-repeated", "share")
        self._alarms.check(
            "data-repeated", repeated, f"{again:.0%} of the tasks of step {step} were trained just before"
        )
        self._trained.extend(tasks)

    def _failures(self, step: int, ended: int, failed: int) -> None:
        """ended: attempts since the start of the run, `failed` of them without a result."""
        attempts = ended - self._ended
        share = (failed - self._failed) / max(1, attempts)
        limit = self._alarms.limit("failing-episodes", "share")
        self._alarms.check("failing-episodes", share > limit, f"{share:.0%} of {attempts} attempts before step {step}")
        self._ended = ended
        self._failed = failed


def _all(recent: deque[bool]) -> bool:
    """Of a window that is full."""
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
