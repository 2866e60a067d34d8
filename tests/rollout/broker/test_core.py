"""Each rule of docs/freshness.md in a scenario whose outcome is known in advance."""

from __future__ import annotations

import math

import pytest

from rl.config.seeds import sample_seed, task_order
from rl.wire.messages import Version
from rollout.broker.actions import (
    EmitBatch,
    EpisodeOutcome,
    EvalReport,
    Finished,
    GroupRecord,
    IssueTicket,
    RevokeTickets,
    StopRun,
)
from rollout.broker.core import BrokerCore
from rollout.broker.rules import Rules
from tests.rollout.broker.driver import Driver, groups_of, of, rules

# ------------------------------------------------------------ F1, F2


@pytest.mark.parametrize(
    ("alpha", "extra", "groups"), [(0, 0, 2), (0.4, 0, 2), (0.5, 0, 3), (1, 0, 4), (1, 2, 6), (9, 0, 8)]
)
def test_admission_counts_whole_groups(alpha: float, extra: int, groups: int) -> None:
    """F1: min(floor((1 + alpha) B), remaining steps * B) + R, with B = 2 and 4 steps."""
    driver = Driver(rules(alpha=alpha, redundant_groups=extra, redundant_episodes=1))
    driver.publish(0)
    assert len({t.group_id for t in driver.live.values()}) == groups
    assert len(driver.live) == 3 * groups
    assert {t.version for t in driver.live.values()} == {Version(0, 0)}


def test_nothing_is_issued_before_the_first_version() -> None:
    driver = Driver(rules())
    assert driver.request(0) == [] and not driver.live
    assert driver.publish(0)


def test_tickets_follow_group_order_and_credit() -> None:
    driver = Driver(rules(alpha=1), capacity=3)
    driver.publish(0)
    assert sorted(t.sample_id for t in driver.live.values()) == [0, 1, 2]
    (ticket,) = of(driver.finish(driver.group(0)[0], 0), IssueTicket)
    assert ticket.ticket.sample_id == 3


def test_a_ticket_carries_the_version_at_its_issue_and_reproducible_seeds() -> None:
    driver = Driver(rules(alpha=1, seed=11))
    driver.publish(0)
    order = task_order(11, 0, 50)
    for ticket in driver.live.values():
        assert ticket.task_index == order[ticket.group_id]
        assert ticket.seed == sample_seed(11, ticket.sample_id) < 2**63
    driver.request(0)
    driver.finish_group(0, 0)
    driver.finish_group(1, 0)
    (fresh, *_) = of(driver.publish(1), IssueTicket)
    assert fresh.ticket.version == Version(0, 1) and fresh.ticket.group_id == 4


def test_no_ticket_goes_out_that_no_later_batch_could_use() -> None:
    """alpha = 0 with a redundant group: once batch 0 is assembled, version 0 is too old for anything."""
    driver = Driver(rules(redundant_groups=1))
    driver.publish(0)
    driver.request(0)
    driver.begin(driver.group(1)[0], 0)
    driver.finish_group(0, 0)
    actions = driver.finish_group(2, 0)
    assert [groups_of(b) for b in of(actions, EmitBatch)] == [[0, 2]]
    assert of(actions, GroupRecord)[0].end == "redundant" and of(actions, IssueTicket) == []

    issued = of(driver.publish(1), IssueTicket)
    assert {i.ticket.group_id for i in issued} == {3, 4, 5}
    assert issued[0].ticket.task_index == next(
        a.ticket.task_index for a in of(driver.actions, IssueTicket) if a.ticket.group_id == 1
    )


# ------------------------------------------------------------ F3


def test_expiry_takes_the_whole_group_and_puts_its_task_in_front() -> None:
    """alpha = 1: a group begun at version 0 and unfinished when batch 1 is assembled fits no later batch."""
    driver = Driver(rules(alpha=1, hold_patience=math.inf))
    driver.publish(0)
    slow = driver.group(0)
    for group_id in range(4):
        driver.begin(driver.group(group_id)[0], 0)

    driver.finish(slow[0], 0)
    driver.finish_group(1, 0)
    driver.finish_group(2, 0)
    driver.request(0)

    driver.publish(1)
    driver.finish_group(3, 0)
    driver.finish_group(4, 1)
    actions = driver.request(1)
    assert groups_of(of(actions, EmitBatch)[0]) == [3, 4]

    (record,) = of(actions, GroupRecord)
    assert (record.group_id, record.end, record.cut_offs) == (0, "stale", 0)
    assert [c.ticket_ids for c in of(actions, RevokeTickets)] == [[slow[1].ticket_id]]
    assert driver.samples("stale") == 2

    again = [i.ticket for i in of(actions, IssueTicket) if i.ticket.task_index == slow[0].task_index]
    assert len(again) == 2 and again[0].group_id > 4
    assert driver.core.groups.open[again[0].group_id].task.cut_offs == 1


@pytest.mark.parametrize(("bound", "trained"), [(1, False), (2, False), (3, True)])
def test_a_slow_group_may_be_older_than_alpha_and_no_more_groups_are_open_for_it(bound: int, trained: bool) -> None:
    """`max_staleness`: begun at version 0, finished while batch 3 is wanted; alpha = 1 and B = 2 let 4 be open."""
    driver = Driver(rules(steps=6, alpha=1, max_staleness=bound, hold_patience=math.inf))
    driver.publish(0)
    slow = driver.group(0)
    driver.begin(slow[0], 0)

    for step in range(3):
        done = [group for group in sorted({t.group_id for t in driver.live.values()}) if group != 0][:2]
        for group in done:
            driver.finish_group(group, step)
        driver.request(step)
        driver.publish(step + 1)
        driver.confirm_cancels()
        assert len({t.group_id for t in driver.live.values()}) == 4

    for ticket in slow:
        if ticket.ticket_id in driver.live:
            driver.finish(ticket, 0)
    other = next(t.group_id for t in driver.live.values())
    driver.finish_group(other, 3)
    actions = driver.request(3)

    assert [groups_of(batch) for batch in of(actions, EmitBatch)] == ([[0, other]] if trained else [])
    assert driver.samples("stale") == (0 if trained else 2)


def test_a_late_first_token_expires_a_group_and_batched_groups_are_exempt() -> None:
    driver = Driver(rules(alpha=1))
    driver.publish(0)
    for group_id in (0, 1):
        driver.finish_group(group_id, 0)
    driver.request(0)
    driver.publish(1)
    for group_id in (4, 5):
        driver.finish_group(group_id, 1)
    driver.request(1)  # batched, untrained, v = 1
    assert driver.samples("batched") == 4 and driver.samples("stale") == 0  # groups 2 and 3 have not started

    actions = driver.begin(driver.group(2)[1], 0)
    assert [(r.group_id, r.end) for r in of(actions, GroupRecord)] == [(2, "stale")]

    driver.publish(2)
    assert driver.samples("trained") == 8


def test_v_is_that_of_live_members() -> None:
    """The first token of an attempt that failed ages its group no longer."""
    driver = Driver(rules(alpha=1))
    driver.publish(0)
    first = driver.group(0)[0]
    driver.begin(first, 0)
    assert driver.core.groups.open[0].version == 0
    driver.fail(first)
    assert driver.core.groups.open[0].version is None


# ------------------------------------------------------------ F4, F5


def test_finished_groups_do_not_wait_for_running_ones_and_older_go_first() -> None:
    driver = Driver(rules(alpha=2))
    driver.publish(0)
    driver.finish_group(0, 0)
    driver.finish_group(4, 0)
    driver.request(0)
    driver.publish(1)
    driver.finish_group(6, 1)
    driver.finish_group(3, 0)
    driver.finish_group(2, 0)
    (batch,) = of(driver.request(1), EmitBatch)
    assert groups_of(batch) == [2, 3]
    assert batch.metrics["staleness/mean"] == 1 and batch.metrics["rollout/reward"] == 0.5


@pytest.mark.parametrize(("patience", "held"), [(0, True), (1, False), (math.inf, False)])
def test_hold_waits_for_a_group_about_to_expire(patience: float, held: bool) -> None:
    driver = Driver(rules(redundant_groups=1, hold_patience=patience, hold_deadline_s=10))
    driver.publish(0)
    driver.begin(driver.group(0)[0], 0)
    driver.finish_group(1, 0)
    driver.finish_group(2, 0)
    batches = of(driver.request(0), EmitBatch)
    if not held:
        assert groups_of(batches[0]) == [1, 2]
        return
    assert batches == [] and driver.core.next_deadline() == 10

    driver.now = 3
    (batch,) = of(driver.finish_group(0, 0), EmitBatch)
    assert groups_of(batch) == [0, 1]
    assert batch.metrics["broker/hold_s"] == 3


def test_hold_after_one_cut_off_and_its_deadline() -> None:
    """P = 1: the first cut-off is not waited for, the second is, until the deadline."""
    driver = Driver(rules(redundant_groups=1, hold_patience=1, hold_deadline_s=10))
    driver.publish(0)
    driver.begin(driver.group(0)[0], 0)
    driver.finish_group(1, 0)
    driver.finish_group(2, 0)
    assert of(driver.request(0), EmitBatch)

    driver.confirm_cancels()
    driver.publish(1)
    driver.begin(driver.group(3)[0], 1)  # the task of group 0 again
    driver.finish_group(4, 1)
    driver.finish_group(5, 1)
    assert of(driver.request(1), EmitBatch) == []
    assert of(driver.do(driver.core.tick(9.9)), EmitBatch) == []

    (batch,) = of(driver.do(driver.core.tick(10.0)), EmitBatch)
    assert groups_of(batch) == [4, 5]


# ------------------------------------------------------------ redundancy, filtering, retries


def test_the_first_g_results_win_and_the_rest_is_cancelled() -> None:
    driver = Driver(rules(redundant_episodes=2))
    driver.publish(0)
    tickets = driver.group(0)
    driver.finish(tickets[3], 0)
    actions = driver.finish(tickets[1], 0)
    assert [c.ticket_ids for c in of(actions, RevokeTickets)] == [[tickets[0].ticket_id, tickets[2].ticket_id]]
    assert driver.samples("redundant") == 2
    assert driver.finish(tickets[0], 0) == [] and driver.samples("waiting") == 2  # too late: dropped, tokens counted
    assert driver.core.ledger.report()["tokens"]["redundant"] == 5


def test_constant_groups_are_dropped_up_to_the_bound() -> None:
    driver = Driver(rules(filter_constant_groups=True, max_filtered_per_step=1))
    driver.publish(0)
    driver.request(0)
    (record,) = of(driver.finish_group(0, 0, (1.0, 1.0)), GroupRecord)
    assert record.end == "filtered" and record.rewards == [1.0, 1.0]
    driver.finish_group(1, 0, (0.0, 0.0))  # the bound is reached: kept
    (batch,) = of(driver.finish_group(2, 0), EmitBatch)
    assert groups_of(batch) == [1, 2] and batch.metrics["broker/filtered_groups"] == 1


def test_a_sample_without_a_reward_completes_its_group_and_is_no_zero() -> None:
    """Filtering, records and metrics look at the others; a group of which one is left has nothing to compare."""
    driver = Driver(rules(groups_per_batch=2, group_size=3, filter_constant_groups=True), capacity=12)
    driver.publish(0)
    driver.request(0)
    one, other, third = driver.group(0)
    driver.finish(one, 0, 1.0)
    driver.finish(other, 0, 1.0)
    (record,) = of(driver.finish(third, 0, 0.0, unrewarded="judge raised TimeoutError"), GroupRecord)
    assert (record.end, record.rewards, record.success) == ("filtered", [1.0, 1.0], 1.0)

    for ticket in driver.group(1):
        actions = driver.finish(ticket, 0, 0.0, unrewarded="judge raised TimeoutError")
    (record,) = of(actions, GroupRecord)
    assert (record.end, record.rewards, record.success) == ("filtered", [], None)

    for group in 2, 3:
        one, other, third = driver.group(group)
        driver.finish(one, 0, 0.0, unrewarded="judge raised TimeoutError")
        driver.finish(other, 0, 1.0)
        actions = driver.finish(third, 0, 0.0)
    (batch,) = of(actions, EmitBatch)
    assert groups_of(batch) == [2, 3] and len(batch.samples) == 6
    assert (batch.metrics["rollout/reward"], batch.metrics["rollout/accuracy"]) == (0.5, 0.5)
    assert batch.metrics["reward/failed"] == 2

    driver.publish(1)
    report = driver.core.report()
    assert report["reward"]["last"] == 0.5
    assert (report["kept"]["episodes"], report["kept"]["success"]) == (6, 0.5)


def test_an_evaluated_task_without_a_reward_has_failed_and_is_not_tried_again() -> None:
    driver = Driver(rules(max_attempts=2), capacity=2)
    (first, second) = of(driver.do(driver.core.eval_requested(Version(0, 0), 2, 0.0)) + driver.publish(0), IssueTicket)
    driver.finish(first.ticket, 0, 0.0, unrewarded="judge raised TimeoutError")
    (report,) = of(driver.finish(second.ticket, 0, 1.0), EvalReport)
    assert (report.accuracy, report.failed, len(report.episodes)) == (1.0, 1, 1)


def test_a_step_tells_the_successes_of_the_groups_that_were_dropped_in_it_and_of_no_earlier_one() -> None:
    driver = Driver(rules(filter_constant_groups=True))
    driver.publish(0)
    driver.request(0)
    driver.finish_group(0, 0, (1.0, 1.0))
    driver.finish_group(1, 0, (0.0, 0.0))
    driver.finish_group(2, 0)
    (first,) = of(driver.finish_group(3, 0), EmitBatch)

    driver.publish(1)
    driver.request(1)
    driver.finish_group(4, 1, (1.0, 1.0))
    driver.finish_group(5, 1)
    (second,) = of(driver.finish_group(6, 1), EmitBatch)

    told = [
        (batch.metrics["broker/filtered_groups"], batch.metrics["broker/filtered_successes"])
        for batch in (first, second)
    ]
    assert told == [(2, 2), (1, 2)]
    assert first.metrics["rollout/accuracy"] == 0.5  # of what is trained


def test_retries_go_first_and_a_group_is_replaced_after_the_last_attempt() -> None:
    driver = Driver(rules(alpha=1, max_attempts=2), capacity=2)
    driver.publish(0)
    first, second = driver.group(0)
    driver.do(driver.core.usage(first.ticket_id, 7, False, 0.0))
    (again,) = of(driver.fail(first), IssueTicket)
    assert (again.ticket.sample_id, again.ticket.attempt) == (0, 1)  # samples 2 to 7 were queued before it
    assert driver.core.ledger.report()["tokens"]["failed"] == 7
    driver.finish(second, 0)
    assert driver.finish(first, 0) == []  # late result of the attempt that had failed
    (record,) = of(driver.fail(again.ticket), GroupRecord)
    assert (record.end, record.rewards) == ("failed", [1.0])
    assert driver.samples("failed") == 2 and len(driver.core.groups.open) == 4


def test_redundant_members_cover_for_one_that_failed_for_good() -> None:
    driver = Driver(rules(redundant_episodes=1, max_attempts=1))
    driver.publish(0)
    driver.fail(driver.group(0)[0])
    driver.finish_group(0, 0)
    assert driver.core.groups.ready == 1 and driver.samples("failed") == 1


def test_a_dead_server_gives_its_tickets_to_another() -> None:
    driver = Driver(rules())
    driver.publish(0)
    before = dict(driver.live)
    assert of(driver.do(driver.core.server_left(0, 0, 0.0)), IssueTicket) == []
    assert driver.do(driver.core.server_joined(0, 0, 100, 0.0)) == []  # a late hello of the dead one
    again = of(driver.do(driver.core.server_joined(0, 1, 100, 0.0)), IssueTicket)
    assert [i.ticket.sample_id for i in again] == [t.sample_id for t in before.values()]
    assert {i.ticket.attempt for i in again} == {1}


def test_failing_for_ever_stops_the_run_with_one_line() -> None:
    driver = Driver(rules(max_attempts=1, max_groups_given_up=3))
    driver.publish(0)
    while not (stops := of(driver.actions, StopRun)):
        driver.fail(next(iter(driver.live.values())))
        driver.confirm_cancels()
    assert stops[0].reason == "3 groups in a row failed every attempt; the last one: boom"


def test_an_episode_without_end_is_cancelled_by_the_broker() -> None:
    driver = Driver(rules(episode_deadline_s=5))
    driver.publish(0)
    assert driver.core.next_deadline() == 35
    actions = driver.do(driver.core.tick(35))
    assert sum(len(c.ticket_ids) for c in of(actions, RevokeTickets)) == 4 == len(of(actions, IssueTicket))


# ------------------------------------------------------------ tokens, timelines, evaluation, end, journal


def test_tokens_are_booked_by_ticket_and_checked_twice() -> None:
    driver = Driver(rules())
    driver.publish(0)
    ticket = driver.group(0)[0]
    driver.finish(ticket, 0, tokens=5)
    driver.do(driver.core.usage(driver.group(1)[0].ticket_id, 3, True, 0.0))
    tokens = driver.core.ledger.report()["tokens"]
    assert (tokens["generated"], tokens["waiting"], tokens["lost"]) == (8, 5, 3)
    assert driver.core.ledger.unused == 3
    assert driver.core.ledger.mismatches == 0
    driver.do(driver.core.usage(ticket.ticket_id, 1, False, 0.0))  # one more than the trajectory says
    assert driver.core.ledger.mismatches == 1

    driver.core.ledger.reports_lost()  # what it was the answer to was lost, and had been asked for again
    driver.do(driver.core.usage(ticket.ticket_id, 4, False, 0.0))
    tokens = driver.core.ledger.report()["tokens"]
    assert (tokens["generated"], tokens["lost"], driver.core.ledger.mismatches) == (13, 8, 0)
    driver.core.ledger.check()


def test_a_ledger_that_does_not_close_fails_the_run() -> None:
    driver = Driver(rules(steps=1, groups_per_batch=1, group_size=1, drain_deadline_s=4))
    driver.publish(0)
    driver.request(0)
    (ticket,) = driver.live.values()
    driver.do(driver.core.finished(ticket.ticket_id, EpisodeOutcome(0, 0, 1.0, 9), 0.0))  # its usage never comes
    driver.publish(1)
    assert driver.core.next_deadline() == 4
    driver.do(driver.core.tick(4.0))
    assert of(driver.actions, Finished)[0].report["ledger_mismatches"] == 1
    assert "claims 9 tokens, generators reported 0" in of(driver.actions, StopRun)[0].reason


def test_results_of_another_timeline_end_stale() -> None:
    driver = Driver(rules(), timeline=5)
    driver.publish(0)
    ticket = driver.group(0)[0]
    driver.do(driver.core.finished(ticket.ticket_id, EpisodeOutcome(4, 0, 1.0, 0), 0.0))
    assert driver.samples("stale") == 2 and of(driver.actions, GroupRecord)[0].end == "stale"


@pytest.mark.parametrize(("version", "what"), [(Version(1, 3), "without that batch"), (Version(0, 1), "in timeline 0")])
def test_a_learner_that_contradicts_itself_stops_the_run(version: Version, what: str) -> None:
    driver = Driver(rules(), timeline=1)
    driver.publish(0)
    assert what in of(driver.do(driver.core.published(version, 0.0)), StopRun)[0].reason


def test_evaluations_take_credit_first_and_stand_outside_the_ledger() -> None:
    driver = Driver(rules(eval_temperature=0.2, max_attempts=2), capacity=1)
    driver.publish(0)
    driver.do(driver.core.eval_requested(Version(0, 0), 2, 0.0))
    issued = driver.samples("issued")
    (first,) = of(driver.finish(driver.group(0)[0], 0), IssueTicket)
    assert (first.ticket.kind, first.ticket.task_index, first.ticket.temperature) == ("eval", 0, 0.2)

    (retry,) = of(driver.fail(first.ticket), IssueTicket)
    assert (retry.ticket.task_index, retry.ticket.attempt) == (0, 1)

    (second,) = of(driver.finish(retry.ticket, 0, 1.0), IssueTicket)
    driver.now = 2.0
    (report,) = of(driver.finish(second.ticket, 1, 0.0), EvalReport)
    assert (report.accuracy, report.tasks, report.failed, report.seconds) == (0.5, 2, 0, 2.0)
    assert report.versions == {0: 1, 1: 1}
    assert driver.samples("issued") == issued and driver.core.ledger.generated == 5


def test_the_end_cancels_what_is_left_and_waits_for_the_last_evaluation() -> None:
    driver = Driver(rules(steps=1, redundant_groups=1, eval_tasks=1))
    driver.publish(0)
    driver.request(0)
    driver.finish_group(0, 0)
    driver.finish_group(1, 0)
    assert driver.samples("redundant") == 2 and len(driver.cancelled) == 2

    driver.publish(1)
    driver.confirm_cancels()
    assert of(driver.actions, Finished) == []

    (ticket,) = of(driver.do(driver.core.eval_requested(Version(0, 1), 1, 0.0)), IssueTicket)
    (end,) = of(driver.finish(ticket.ticket, 1), Finished)
    report = end.report
    assert report["steps"] == 1 and report["useful_tokens"] == 20 and report["kept_over_issued_length"] == 1
    assert report["staleness"] == {"mean": 0, "max": 0, "histogram": {"0": 4}}
    assert report["reward"] == {"first": 0.5, "last": 0.5} and report["eval"]["last"]["versions"] == {"1": 1}

    samples = "issued queued running waiting batched trained stale filtered settled redundant failed"
    assert list(report["ledger"]["samples"]) == samples.split()

    tokens = "generated running waiting batched trained stale filtered settled redundant failed lost"
    assert list(report["ledger"]["tokens"]) == tokens.split()


def test_an_evaluation_asked_for_while_the_end_waits_is_answered_without_a_busy_wait() -> None:
    """The end waits for a ticket that is not cancelled yet, up to a deadline, which begins anew."""
    driver = Driver(rules(steps=1, redundant_groups=1, drain_deadline_s=5.0))
    driver.publish(0)
    driver.request(0)
    driver.finish_group(0, 0)
    driver.finish_group(1, 0)
    driver.publish(1)
    assert driver.core.next_deadline() == 5.0

    driver.now = 4.0
    (issued,) = of(driver.do(driver.core.eval_requested(Version(0, 1), 1, driver.now)), IssueTicket)
    driver.now = 6.0
    driver.do(driver.core.tick(driver.now))
    due = driver.core.next_deadline()
    assert due is None or due > driver.now
    assert of(driver.actions, Finished) == []

    assert len(of(driver.finish(issued.ticket, 1), EvalReport)) == 1
    assert of(driver.actions, Finished) == [] and driver.core.next_deadline() == 11.0
    driver.confirm_cancels()
    assert len(of(driver.actions, Finished)) == 1 and driver.core.next_deadline() is None


def test_a_restored_core_issues_the_open_groups_again() -> None:
    driver = Driver(rules(alpha=1))
    driver.publish(0)
    driver.finish_group(0, 0)
    driver.finish_group(1, 0)
    driver.request(0)
    driver.publish(1)
    driver.finish(driver.group(2)[0], 0)
    driver.fail(driver.group(3)[0])
    state = driver.core.snapshot()
    assert state["ledger"]["issued"] == 4
    open_tasks = {t.group_id: t.task_index for t in driver.live.values()}

    resumed = Driver(rules(alpha=1), state=state, timeline=1)
    resumed.core.ledger.check()
    resumed.publish(1)
    assert {t.group_id: t.task_index for t in resumed.live.values()} == open_tasks
    assert all(t.seed == sample_seed(0, t.sample_id) for t in resumed.live.values())
    assert not set(resumed.live) & set(driver.live)
    assert resumed.samples("issued") == 12 and resumed.samples("trained") == 4
    for ticket in list(driver.live.values()):  # the old timeline is over
        assert resumed.do(resumed.core.finished(ticket.ticket_id, EpisodeOutcome(0, 0, 1.0, 5), 0.0)) == []
    assert resumed.core.groups.tasks.next_group == driver.core.groups.tasks.next_group


def test_a_resumed_synchronous_run_draws_the_same_groups_as_an_uninterrupted_one() -> None:
    def play(driver: Driver, begin: int, end: int) -> list[tuple[int, int, int]]:
        seen = []
        for step in range(begin, end):
            driver.request(step)
            for group_id in (2 * step, 2 * step + 1):
                seen += [(t.sample_id, t.task_index, t.seed) for t in driver.group(group_id)]
                driver.finish_group(group_id, step)
            driver.publish(step + 1)
        return seen

    whole = Driver(rules(train_tasks=3))
    whole.publish(0)
    expected = play(whole, 0, 4)
    half = Driver(rules(train_tasks=3))
    half.publish(0)
    first = play(half, 0, 2)
    rest = Driver(rules(train_tasks=3), state=half.core.snapshot(), timeline=1)
    rest.publish(2)
    assert first + play(rest, 2, 4) == expected
    assert of(rest.actions, Finished)[0].report["ledger"]["samples"]["trained"] == 16


def test_a_journal_of_other_groups_is_refused() -> None:
    state = Driver(rules()).core.snapshot()
    with pytest.raises(ValueError, match="redundant_episodes=1: its groups have 0; set it as it was"):
        BrokerCore(rules(redundant_episodes=1)).restore(state)


@pytest.mark.parametrize(
    ("alpha", "groups", "admitted"),
    [(0.4, 45, 63), (0.1, 10, 11), (0.7, 10, 17), (0.5, 3, 4), (0, 8, 8), (1.1, 10, 21)],
)
def test_admission_counts_alpha_as_it_is_written(alpha: float, groups: int, admitted: int) -> None:
    """F1 in exact decimals: in floats (1 + 0.4) * 45 is 62.99999999999999."""
    rules = Rules(steps=100, groups_per_batch=groups, group_size=1, train_tasks=1, alpha=alpha)

    assert rules.admitted(0) == admitted
