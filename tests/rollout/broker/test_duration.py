"""A run that ends by its time: when the clock begins, which batch is the last, and what becomes of the rest."""

from __future__ import annotations

from rl.wire.messages import Version
from rollout.broker.actions import BatchSample, EmitBatch, Finished, IssueTicket
from rollout.broker.assembly import make_batch_parts, no_batch, outcome_of
from rollout.broker.group_state import Duration
from tests.rollout.broker.driver import Driver, of, rules
from tests.rollout.broker.test_assembly import GOOD


def batch(driver: Driver, groups: tuple[int, int], at: float) -> EmitBatch:
    """The two groups are played by the newest version, and the second one ends at this time."""
    driver.finish_group(groups[0], driver.core.n)
    driver.now = at
    (emitted,) = of(driver.finish_group(groups[1], driver.core.n), EmitBatch)
    assert isinstance(emitted, EmitBatch)
    return emitted


def is_last(driver: Driver) -> bool:
    return driver.core.groups.e == driver.core.groups.run.steps


def test_the_first_batch_after_the_time_is_the_last() -> None:
    """Synchronous, two groups a batch, 10 seconds that begin when the first version has been evaluated."""
    driver = Driver(rules(steps=1000, seconds=10, eval_tasks=1))
    driver.publish(0)
    (asked,) = of(driver.do(driver.core.eval_requested(Version(0, 0), 1, driver.now)), IssueTicket)
    driver.now = 5.0
    driver.finish(asked.ticket, 0)

    driver.request(0)
    assert batch(driver, (0, 1), at=14.0).over == 0.9 and not is_last(driver)
    driver.publish(1)
    driver.request(1)
    last = batch(driver, (2, 3), at=16.0)
    assert last.over == 1.1 and is_last(driver)

    driver.publish(2)
    assert not driver.live and driver.request(2) == []
    (asked,) = of(driver.do(driver.core.eval_requested(Version(0, 2), 1, driver.now)), IssueTicket)
    (finished,) = of(driver.finish(asked.ticket, 2), Finished)
    assert finished.report["eval"]["last"]["versions"] == {"2": 1} and driver.samples("trained") == 8


def test_groups_that_run_when_the_time_is_over_end_redundant() -> None:
    driver = Driver(rules(steps=1000, seconds=10, alpha=1))
    driver.publish(0)
    driver.request(0)
    assert batch(driver, (0, 1), at=10.0).over == 1.0
    assert sorted(driver.cancelled) == sorted(ticket.ticket_id for ticket in driver.live.values()) and driver.cancelled
    driver.confirm_cancels()
    assert of(driver.publish(1), Finished) and driver.samples("redundant") == 4


def test_steps_end_a_run_whose_time_is_not_over() -> None:
    driver = Driver(rules(steps=1, seconds=1e6))
    driver.publish(0)
    driver.request(0)
    assert batch(driver, (0, 1), at=10.0).over == 1e-5 and is_last(driver)
    assert of(driver.publish(1), Finished)


def test_later_evaluations_count_as_training() -> None:
    run = Duration(50, 10.0)
    run.begin(7, 100.0)
    run.evaluated(7, 102.0)
    run.evaluated(9, 105.0)
    assert run.assembled(11, 107.0) == 0.5 and run.steps == 50
    assert run.assembled(12, 112.0) == 1.0 and run.steps == 13
    assert Duration(50, None).assembled(11, 1e9) == 0


def test_every_rank_is_told() -> None:
    samples = [BatchSample(index, 0, 0, 3, outcome_of(GOOD)) for index in range(2)]
    batch_parts = make_batch_parts(EmitBatch(3, samples, {}, over=1.25), timeline=0, ranks=2)
    assert [batch_part.over for batch_part in batch_parts] == [1.25, 1.25]
    assert no_batch(3, 3, 0, 1).over == 1 and no_batch(3, 4, 0, 1).over == 0
