"""What the broker's guards say of a run that was taken back: nothing that an undo makes so."""

from __future__ import annotations

from rl.config.alarms import AlarmsConfig
from rl.observe.alarms import Alarms
from rollout.broker.actions import BatchSample, EmitBatch, EpisodeOutcome
from rollout.broker.guards import BatchGuards
from rollout.broker.statistics import Statistics
from tests.rollout.broker.driver import rules


def raised_by(*batches: tuple[int, list[int]]) -> list[str]:
    """The alarms of these batches, by step and tasks."""
    raised: list[str] = []
    guards = BatchGuards(rules(train_tasks=100), Alarms(AlarmsConfig(), lambda name, _: raised.append(name)))
    for step, tasks in batches:
        samples = [
            BatchSample(10 * task + member, task, task, step, EpisodeOutcome(step, step, float(member), 4))
            for task in tasks
            for member in (0, 1)
        ]
        guards.batch(EmitBatch(step, samples, {}), Statistics())
    return [name for name in raised if name == "data-repeated"]


def test_tasks_of_steps_that_were_taken_back_come_again() -> None:
    first = [(0, [1, 2]), (1, [3, 4]), (2, [5, 6])]
    assert raised_by(*first, (1, [3, 4]), (2, [5, 6]), (3, [7, 8])) == []
    assert raised_by(*first, (3, [3, 4]))
    assert raised_by(*first, (1, [1, 2]))  # step 0 stands
