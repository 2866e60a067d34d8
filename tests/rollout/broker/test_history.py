"""A learner that died comes back with other weights: what held the old ones ends stale, and the books close."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from rl.wire.messages import Version
from rollout.broker.actions import EmitBatch, EpisodeOutcome, GroupRecord, StopRun
from rollout.broker.rules import Rules
from tests.rollout.broker.driver import Driver, of
from tests.rollout.broker.test_properties import configurations
from tests.rollout.broker.world import World


class RollingBack(World):
    """Now and then the learner dies, and a version since its checkpoint comes out otherwise.

    Tickets of an earlier timeline end by a failure or a cancel: no generator answers them any more.
    """

    checkpoint = 0
    rolled_back = 0

    def step(self) -> None:
        if self.published > 0 and self.report is None and self.random.random() < 0.03:
            self.roll_back(self.random.randint(self.checkpoint, self.published))
        super().step()

    def roll_back(self, n: int) -> None:
        self.rolled_back += 1
        self.timeline += 1
        self.published = n
        self.asked = n

        self.batches = {step: batch for step, batch in self.batches.items() if step < n}
        self.trained = {sample.sample_id for batch in self.batches.values() for sample in batch.samples}
        self.do(self.core.published(Version(self.timeline, n), self.now))
        if n == self.rules.steps and self.rules.eval_tasks:
            self.do(self.core.eval_requested(Version(self.timeline, n), self.rules.eval_tasks, self.now))

    def generate(self, ticket_id: int, *, told: bool = True) -> None:
        if self.running[ticket_id].ticket.version.timeline == self.timeline:
            super().generate(ticket_id, told=told)

    def finish(self, ticket_id: int, reward: float | None = None) -> None:
        if self.running[ticket_id].ticket.version.timeline == self.timeline:
            super().finish(ticket_id, reward)
        elif self.running[ticket_id].cancelled:
            self.confirm_cancel(ticket_id)
        else:
            self.fail(ticket_id)


@given(config=configurations(), seed=st.integers(0, 2**32), events=st.integers(50, 400), capacity=st.integers(1, 12))
@settings(max_examples=80)
def test_any_interleaving_with_roll_backs_closes_its_books(
    config: Rules, seed: int, events: int, capacity: int
) -> None:
    world = RollingBack(config, seed, capacity=capacity)
    for _ in range(events):
        world.step()
    world.finish_all()
    assert not world.stopped and world.report is not None
    assert sorted(world.batches) == list(range(config.steps))
    assert world.report["freshness_violations"] == 0 and world.report["ledger_mismatches"] == 0

    samples = world.report["ledger"]["samples"]
    kept = [sample for batch in world.batches.values() for sample in batch.samples]
    assert samples["trained"] == len({sample.sample_id for sample in kept}) == len(kept)
    assert samples["issued"] == sum(count for state, count in samples.items() if state != "issued")
    assert sum(world.report["staleness"]["histogram"].values()) == world.report["kept"]["episodes"] == len(kept)
    tokens = world.report["ledger"]["tokens"]
    assert tokens["trained"] == sum(sample.outcome.tokens_generated for sample in kept)


def driver_with_history() -> Driver:
    """Three batches of one group of two, of which 0 and 1 were trained; what is complete stands at version 2."""
    driver = Driver(Rules(steps=6, groups_per_batch=1, group_size=2, train_tasks=100, alpha=2))
    driver.publish(0)
    for step in range(2):
        driver.request(step)
        driver.finish_group(step, version=step)
        driver.publish(step + 1)
    return driver


def finish(driver: Driver, group_id: int, *, oldest: int, newest: int) -> None:
    for ticket in driver.group(group_id):
        driver.live.pop(ticket.ticket_id)
        driver.do(driver.core.usage(ticket.ticket_id, 5, False, driver.now))
        outcome = EpisodeOutcome(0, oldest, 1.0, 5, 5, newest_version=newest)
        driver.do(driver.core.finished(ticket.ticket_id, outcome, driver.now))


def test_what_holds_the_version_or_a_later_one_ends_stale_and_what_is_older_stays() -> None:
    driver = driver_with_history()
    finish(driver, 2, oldest=0, newest=0)
    finish(driver, 3, oldest=0, newest=1)
    assert driver.samples("trained") == 4 and driver.samples("waiting") == 4

    driver.actions.clear()
    driver.do(driver.core.published(Version(1, 1), driver.now))
    driver.timeline = 1
    assert driver.core.n == 1 and driver.core.timeline == 1
    assert driver.samples("trained") == 2, "batch 0 stays trained, batch 1 was made of weights that are no more"
    assert driver.samples("waiting") == 2 and driver.core.groups.open[2].done == 2
    assert {record.group_id for record in of(driver.actions, GroupRecord)} == {3, 4}

    (batch,) = [each for each in driver.request(1) if isinstance(each, EmitBatch)]
    assert {sample.group_id for sample in batch.samples} == {2}
    driver.core.ledger.check()


def test_tasks_of_batches_that_were_taken_back_come_first() -> None:
    driver = driver_with_history()
    task = driver.live[min(driver.live)].task_index if driver.live else None
    taken_back = driver.core.history._steps[1].groups[0].task.task_index
    driver.live.clear()
    driver.do(driver.core.published(Version(1, 1), driver.now))
    assert next(iter(driver.live.values())).task_index == taken_back != task
    assert all(ticket.version == Version(1, 1) for ticket in driver.live.values())


def test_an_evaluation_of_a_version_that_is_no_more_is_asked_for_again() -> None:
    driver = driver_with_history()
    driver.do(driver.core.eval_requested(Version(0, 1), 2, driver.now))
    driver.do(driver.core.eval_requested(Version(0, 2), 2, driver.now))
    driver.live.clear()

    driver.do(driver.core.published(Version(1, 2), driver.now))
    assert [each.version for each in driver.core.evaluations.pending] == [Version(1, 1)]
    driver.do(driver.core.eval_requested(Version(1, 1), 2, driver.now))  # goes on, and is not begun twice
    driver.do(driver.core.eval_requested(Version(1, 2), 2, driver.now))
    assert [each.version for each in driver.core.evaluations.pending] == [Version(1, 1), Version(1, 2)]


def test_a_learner_that_comes_back_after_the_end_with_other_weights_stops_the_run() -> None:
    driver = Driver(Rules(steps=1, groups_per_batch=1, group_size=2, train_tasks=100))
    driver.publish(0)
    driver.request(0)
    driver.finish_group(0, version=0)
    driver.publish(1)
    stops = of(driver.do(driver.core.published(Version(1, 1), driver.now)), StopRun)
    assert "cannot be taken back now" in stops[0].reason
