"""Redundancy beyond groups, slow and failing servers, priorities, curricula, baselines: outcomes known in advance."""

from __future__ import annotations

from typing import Any

import pytest

from rl.config.schema import ConfigError, load_config
from rl.wire.messages import Ticket, Version
from rollout.broker.actions import EmitBatch, EpisodeOutcome, GroupRecord, IssueTicket
from rollout.broker.built_in_hooks import MIN_PEERS, Quarantine
from rollout.broker.core import BrokerCore
from rollout.broker.rules import Rules
from rollout.broker.tasks import DrawnTask
from tests.rollout.broker.audited import AuditedLedger
from tests.rollout.broker.driver import Driver, groups_of, of, rules

# ------------------------------------------------------------ second copies


def slow_episode(**changes: Any) -> tuple[Driver, Ticket]:
    """Every peer took one second; one episode of server 0 still runs when a second copy is due."""
    driver = Driver(rules(groups_per_batch=11, hooks=[{"hedging": {"quantile": 0.9}}], **changes))
    driver.publish(0)
    driver.now = 1.0
    for ticket in list(driver.live.values())[1:]:
        driver.finish(ticket, 0)
    assert driver.core.stats.issued.episodes >= MIN_PEERS
    slow = next(ticket for ticket in driver.live.values())
    return driver, slow


def hedge(driver: Driver, slow: Ticket) -> Ticket:
    driver.do(driver.core.server_joined(1, 0, 100, driver.now))
    copies = [t for t in driver.live.values() if t.sample_id == slow.sample_id and t is not slow]
    (copy,) = copies
    assert driver.core.ledger.attempts[copy.ticket_id].server == 1
    return copy


def test_a_slow_episode_gets_a_second_copy_on_another_server_only() -> None:
    driver, slow = slow_episode()
    driver.do(driver.core.tick(driver.now))
    assert len([t for t in driver.live.values() if t.sample_id == slow.sample_id]) == 1, "there is no other server"
    copy = hedge(driver, slow)
    assert (copy.seed, copy.group_id, copy.task_index) == (slow.seed, slow.group_id, slow.task_index)
    assert driver.core.stats.hedged == 1 and driver.core.ledger.spares == 1


def test_the_first_copy_to_finish_wins_and_the_other_is_cancelled_at_once() -> None:
    for second_wins in (True, False):
        driver, slow = slow_episode()
        copy = hedge(driver, slow)
        winner, loser = (copy, slow) if second_wins else (slow, copy)
        driver.do(driver.core.usage(loser.ticket_id, 7, False, driver.now))
        driver.finish(winner, 0)
        assert driver.cancelled == [loser.ticket_id]
        driver.confirm_cancels()
        tokens = driver.core.ledger.report()["tokens"]
        assert tokens["redundant"] == 7 and tokens["running"] == 0
        assert driver.core.stats.hedges_won == second_wins and driver.core.ledger.spares == 0


def test_a_copy_takes_over_when_the_other_fails() -> None:
    driver, slow = slow_episode(max_attempts=1)
    copy = hedge(driver, slow)
    driver.do(driver.core.usage(slow.ticket_id, 3, False, driver.now))
    driver.do(driver.core.usage(copy.ticket_id, 4, False, driver.now))
    driver.fail(slow)
    tokens = driver.core.ledger.report()["tokens"]
    assert (tokens["failed"], tokens["redundant"], tokens["running"]) == (3, 0, 4)
    driver.finish(copy, 0, tokens=1)
    assert driver.core.ledger.report()["samples"]["failed"] == 0


def test_second_copies_are_bounded_and_end_with_their_sample() -> None:
    """A share of the samples that run or wait: those that wait are what the slow ones hold up."""
    driver = Driver(rules(groups_per_batch=40, group_size=1, hooks=[{"hedging": {"quantile": 0.75}}]))
    driver.publish(0)
    driver.now = 1.0
    for ticket in list(driver.live.values())[:MIN_PEERS]:
        driver.finish(ticket, 0)
    driver.now = 5.0  # every other episode is slow: 20 of them
    driver.do(driver.core.server_joined(1, 0, 100, driver.now))
    assert driver.core.ledger.spares == 10, "a quarter of 20 that run and 20 that wait"


# ------------------------------------------------------------ quarantine


def two_servers(**changes: Any) -> BrokerCore:
    core = BrokerCore(
        rules(hooks=[{"quarantine": {"failures": 2, "seconds": 10}}], max_attempts=99, **changes),
        ledger=AuditedLedger(),
    )
    core.server_joined(0, 0, 50, 0.0)
    core.server_joined(1, 0, 50, 0.0)
    return core


def quarantine(core: BrokerCore) -> Quarantine:
    (hook,) = core.hooks
    assert isinstance(hook, Quarantine)
    return hook


def issue(core: BrokerCore, now: float = 0.0) -> dict[int, int]:
    return {a.ticket.ticket_id: a.server for a in of(core.published(Version(0, 0), now), IssueTicket)}


def test_a_server_that_keeps_failing_is_quarantined_for_longer_each_time() -> None:
    core = two_servers(groups_per_batch=8)
    where = issue(core)
    bad = [ticket_id for ticket_id, server in where.items() if server == 0]
    first, second, third = bad[:3]
    assert [a.server for a in of(core.failed(first, "boom", 1.0), IssueTicket)]
    assert [a.server for a in of(core.failed(second, "boom", 1.0), IssueTicket)] == [1]
    assert core.servers.by_index[0].suspended and core.report()["hooks"]["quarantines"] == 1
    assert [a.server for a in of(core.failed(third, "boom", 1.0), IssueTicket)] == [1], "it has no tickets to give"
    assert core.next_deadline() == 11.0

    core.tick(11.0)
    assert not core.servers.by_index[0].suspended

    core.failed(bad[3], "boom", 12.0)  # one failure is enough now
    assert core.next_deadline() == 12.0 + 20.0


def test_the_last_server_in_service_is_never_quarantined() -> None:
    core = two_servers(groups_per_batch=8)
    for ticket_id in issue(core):
        core.failed(ticket_id, "boom", 1.0)
    assert sum(server.suspended for server in core.servers.by_index.values()) == 1


def die(core: BrokerCore, incarnation: int, now: float) -> None:
    """Server 0 dies, and its next incarnation joins."""
    core.server_left(0, incarnation, now)
    core.server_joined(0, incarnation + 1, 50, now)


def test_a_server_that_keeps_dying_with_its_episodes_is_quarantined() -> None:
    core = two_servers(groups_per_batch=8)
    issue(core)
    die(core, 0, 1.0)
    assert not core.servers.by_index[0].suspended

    core.server_left(1, 0, 1.0)
    core.server_joined(1, 1, 50, 1.0)  # what it held goes out again, some of it to server 0
    assert core.servers.by_index[0].live

    core.server_left(0, 1, 2.0)
    actions = core.server_joined(0, 2, 50, 2.0)
    server = core.servers.by_index[0]
    assert server.suspended and not server.live and core.report()["hooks"]["quarantines"] == 1
    assert not [action for action in of(actions, IssueTicket) if action.server == 0]
    assert quarantine(core).next_deadline() == 12.0

    die(core, 2, 3.0)
    assert core.servers.by_index[0].suspended, "a death does not shorten it"
    assert core.report()["hooks"]["quarantines"] == 1, "nor does one without episodes count"

    core.tick(12.0)
    assert not core.servers.by_index[0].suspended


def test_deaths_without_episodes_and_before_a_success_are_forgiven() -> None:
    core = two_servers(groups_per_batch=8)
    for incarnation in range(5):
        die(core, incarnation, 1.0)  # before the first version: it holds nothing
    assert core.report()["hooks"]["quarantines"] == 0
    issue(core, 2.0)
    core.server_left(0, 5, 2.0)
    core.server_joined(0, 6, 50, 2.0)
    assert quarantine(core).health[0].failures == 1
    core.server_left(1, 0, 3.0)  # its episodes go to server 0
    (held, *_) = core.servers.by_index[0].live
    core.finished(held, EpisodeOutcome(0, 0, 1.0, 0), 4.0)
    assert quarantine(core).health[0].failures == 0


def test_the_last_server_in_service_joins_without_quarantine() -> None:
    core = two_servers(groups_per_batch=8)
    issue(core)
    core.server_left(1, 0, 1.0)
    for incarnation in range(4):
        die(core, incarnation, 2.0)
    assert core.report()["hooks"]["quarantines"] == 0 and core.servers.by_index[0].live


# ------------------------------------------------------------ what is no longer needed


def test_groups_beyond_a_complete_batch_go_on_for_the_next_one() -> None:
    driver = Driver(rules(alpha=1, redundant_groups=2))
    driver.publish(0)
    driver.request(0)
    for group in (2, 3, 4, 5):
        driver.begin(driver.group(group)[0], 0)
    driver.finish_group(0, 0)
    (batch,) = of(driver.finish_group(1, 0), EmitBatch)
    assert groups_of(batch) == [0, 1]
    assert not driver.cancelled and not of(driver.actions, GroupRecord)


def test_groups_beyond_a_complete_batch_that_have_sampled_nothing_go_on_too() -> None:
    """alpha = 0: groups 2 and 3 are still in reset. They have no version yet, and do not age."""
    driver = Driver(rules(redundant_groups=2))
    driver.publish(0)
    driver.request(0)
    tasks = {ticket.task_index for group in (2, 3) for ticket in driver.group(group)}
    driver.finish_group(0, 0)
    actions = driver.finish_group(1, 0)
    (batch,) = of(actions, EmitBatch)
    assert groups_of(batch) == [0, 1] and not of(actions, IssueTicket) and not driver.cancelled

    issued = {action.ticket.task_index for action in of(driver.publish(1), IssueTicket)}
    assert not tasks & issued


def test_what_was_cut_off_is_measured() -> None:
    driver = Driver(rules(group_size=2, filter_constant_groups=True))
    driver.publish(0)
    driver.finish_group(0, 0, (1.0, 1.0))
    cut = driver.core.report()["cut"]["filtered"]["finished"]
    assert (cut["episodes"], cut["success"], cut["length"], cut["turns"]) == (2, 1.0, 5.0, 1.0)


def test_how_far_what_was_cancelled_had_come_is_measured() -> None:
    """One of three groups is cut off with the first batch: its turns are the server's word, its tokens the
    generators', before or after the ticket's end; the dead server's are counted without turns."""
    driver = Driver(rules(alpha=0, redundant_groups=1))
    driver.publish(0)
    driver.request(0)
    first, second = driver.group(2)
    driver.begin(first, 0)
    driver.finish_group(0, 0)
    driver.do(driver.core.usage(first.ticket_id, 40, False, driver.now))
    driver.now = 8.0
    driver.finish_group(1, 0)
    assert set(driver.cancelled) == {first.ticket_id, second.ticket_id}
    assert "redundant" not in driver.core.report()["cut"], "counted at their end"

    driver.do(driver.core.cancelled(first.ticket_id, driver.now, turns=3))
    driver.do(driver.core.usage(first.ticket_id, 20, False, driver.now))
    driver.do(driver.core.usage(first.ticket_id, 99, True, driver.now))  # of a generator that died
    driver.do(driver.core.server_left(0, 0, driver.now))
    report = driver.core.report()
    assert report["cut"]["redundant"]["running"] == {"episodes": 2, "turns": 3.0, "tokens": 30.0, "seconds": 8.0}

    driver.publish(1)
    assert driver.core.report()["kept_against_cut"] == {
        "length": {"kept": 5.0, "cut": 30.0},
        "turns": {"kept": 1.0, "cut": 3.0},
        "success": {"kept": 0.5, "cut": None},
    }


@pytest.mark.parametrize("late", [False, True])
def test_an_episode_that_finished_before_its_cancel_arrived_is_known_in_full(late: bool) -> None:
    """Once, also when the generators report its tokens after its trajectory has come."""
    driver = Driver(rules(redundant_episodes=1))
    driver.publish(0)
    straggler = driver.group(0)[2]
    driver.finish_group(0, 0)
    assert driver.cancelled == [straggler.ticket_id]
    driver.finish(straggler, 0, reward=1.0, tokens=80, late=late)
    cut = driver.core.report()["cut"]["redundant"]
    assert (cut["finished"]["episodes"], cut["finished"]["length"]) == (1, 80.0)
    assert (cut["running"]["episodes"], cut["running"]["tokens"]) == (0, 0.0)
    assert driver.core.report()["kept_against_cut"]["length"]["cut"] == 80.0
    assert driver.core.report()["kept_against_cut"]["success"] == {"kept": None, "cut": 1.0}


def test_copies_that_lose_are_cut_and_attempts_that_fail_are_counted_by_themselves() -> None:
    driver, slow = slow_episode()
    copy = hedge(driver, slow)
    driver.do(driver.core.usage(slow.ticket_id, 7, False, driver.now))
    driver.now = 5.0
    driver.finish(copy, 0)
    driver.do(driver.core.cancelled(slow.ticket_id, driver.now, turns=2))
    cut = driver.core.report()["cut"]
    assert cut["redundant"]["running"] == {"episodes": 1, "turns": 2.0, "tokens": 7.0, "seconds": 5.0}
    assert driver.core.report()["kept_against_cut"]["length"]["cut"] == 7.0

    driver, slow = slow_episode()
    driver.live.pop(slow.ticket_id)
    driver.do(driver.core.failed(slow.ticket_id, "boom", 3.0, turns=4))
    assert driver.core.report()["cut"]["failed"]["running"]["turns"] == 4.0
    assert driver.core.report()["kept_against_cut"]["turns"]["cut"] is None, "nobody cut it"


# ------------------------------------------------------------ priorities


class LastTaskFirst:
    """A custom priority, named by its import path."""

    def issue(self, task: DrawnTask) -> float:
        return -task.origin

    def consume(self, version: int, task: DrawnTask) -> float:
        return -task.origin


@pytest.mark.parametrize(
    ("priority", "issued", "consumed"),
    [
        ("oldest", [0, 1, 2, 3], [0, 1]),
        ("freshest", [0, 1, 2, 3], [2, 3]),
        (f"{__name__}:LastTaskFirst", [3, 2, 1, 0], [3, 2]),
    ],
)
def test_priorities(priority: str, issued: list[int], consumed: list[int]) -> None:
    driver = Driver(rules(alpha=1, priority=priority))
    driver.publish(0)
    assert list(dict.fromkeys(ticket.group_id for ticket in driver.live.values())) == issued
    for group in (0, 1):
        driver.begin(driver.group(group)[0], 0)
    for group, version in ((0, 0), (1, 0), (2, 1), (3, 1)):
        driver.finish_group(group, version)
    (batch,) = of(driver.request(0), EmitBatch)
    assert groups_of(batch) == consumed


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"priority": "freshes"}, "did you mean 'freshest'"),
        ({"curriculum": "no.such:Thing"}, "cannot be imported"),
        ({"curriculum": {"success": {"floor": 0}}}, "must lie in"),
        ({"curriculum": {"success": {"rest": 0}}}, "rest=0 must be at least 1"),
    ],
)
def test_bad_names_are_one_clear_error(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        BrokerCore(rules(**changes))


# ------------------------------------------------------------ baselines


def test_the_batch_barrier_starts_and_assembles_only_between_rounds() -> None:
    driver = Driver(rules(hooks=["batch_barrier"], redundant_groups=1, filter_constant_groups=True))
    driver.publish(0)
    driver.request(0)
    driver.finish_group(0, 0)
    actions = driver.finish_group(1, 0)
    assert not of(actions, EmitBatch), "group 2 runs"
    actions = driver.finish_group(2, 0, (1.0, 1.0))
    assert len(of(actions, EmitBatch)) == 1
    assert len(of(driver.publish(1), IssueTicket)) == 6, "the next round"
    assert [r.end for r in of(actions, GroupRecord)] == ["filtered"]


def test_hold_patience_trades_waste_for_speed() -> None:
    """F5: P = 0 waits for the straggler, P = inf never does, P = 1 once it has been cut off."""
    emitted = {}
    for patience in (0, 1, float("inf")):
        driver = Driver(rules(alpha=1, hold_patience=patience, steps=9))
        steps: list[int] = []
        straggler = None

        for step in range(6):
            driver.publish(step)
            straggler = straggler or driver.group(0)[0].task_index
            for ticket in list(driver.live.values()):
                if ticket.task_index == straggler:
                    driver.begin(ticket, ticket.version.n)

            driver.request(step)
            for ticket in list(driver.live.values()):
                if ticket.task_index != straggler:
                    driver.finish(ticket, max(ticket.version.n, step))

            steps += [batch.step for batch in of(driver.actions, EmitBatch) if batch.step not in steps]
            driver.confirm_cancels()
            if step not in steps:
                break
        emitted[patience] = len(steps)

    assert emitted[float("inf")] == 6
    assert emitted[0] < emitted[1] < 6


def test_rules_come_from_the_configuration() -> None:
    changes = """
        rollout.priority=freshest rollout.curriculum=success rollout.hooks=[batch_barrier] rollout.redundant_groups=3
    """
    made = Rules.of(load_config(None, changes.split()), 10)
    assert (made.priority, made.curriculum, made.hooks) == ("freshest", "success", ["batch_barrier"])
    assert made.redundant_groups == 3
