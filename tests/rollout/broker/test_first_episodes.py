"""Groups that begin with a few episodes: outcomes known in advance, and no choice by anything but rewards."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest

from rl.config.schema import ConfigError, load_config
from rollout.broker.actions import EmitBatch, GroupRecord, IssueTicket
from rollout.broker.tasks import mixed_chance
from tests.rollout.broker.driver import Driver, groups_of, of, rules


def driver_of(**changes: Any) -> Driver:
    settings = {"group_size": 4, "first_episodes": 2, "filter_constant_groups": True}
    driver = Driver(rules(**(settings | changes)))
    driver.publish(0)
    return driver


def test_the_rest_of_a_group_begins_when_its_first_episodes_have_differed() -> None:
    driver = driver_of()
    first = driver.group(0)
    assert [ticket.sample_id for ticket in first] == [0, 1]
    assert not of(driver.finish(first[0], 0, 1.0), IssueTicket), "one result says nothing"

    begun = of(driver.finish(first[1], 0, 0.0), IssueTicket)
    assert [action.ticket.sample_id for action in begun] == [2, 3]
    driver.finish_group(0, 0)
    assert driver.samples("waiting") == 4 and driver.core.groups.ready == 1


def test_a_group_whose_first_episodes_are_equal_ends_and_the_rest_never_begins() -> None:
    driver = driver_of()
    actions = driver.finish_group(0, 0, (1.0, 1.0))
    (record,) = of(actions, GroupRecord)
    assert (record.end, record.rewards) == ("settled", [1.0, 1.0])
    assert {action.ticket.group_id for action in of(actions, IssueTicket)} == {2}, "another group in its place"

    books = driver.core.ledger.report()
    assert books["samples"]["settled"] == 2 and books["tokens"]["settled"] == 10
    assert books["samples"]["issued"] == 6, "two groups with two episodes each are open"
    assert driver.core.groups.tasks.take()[1].cut_offs == 0, "its task was not cut off"


def test_a_group_that_differs_at_first_and_one_that_is_constant_as_a_whole_are_told_apart() -> None:
    driver = driver_of(groups_per_batch=1, redundant_groups=2, first_episodes=2)
    driver.request(0)
    driver.finish_group(0, 0, (1.0, 1.0))
    driver.finish_group(1, 0, (1.0, 0.0))
    (batch,) = of(driver.finish_group(1, 0, (0.0, 0.0)), EmitBatch)
    assert groups_of(batch) == [1] and len(batch.samples) == 4
    assert (batch.metrics["broker/settled_groups"], batch.metrics["broker/filtered_groups"]) == (1, 0)
    assert batch.metrics["broker/settled_samples"] == 2


def test_at_most_so_many_groups_are_dropped_a_step_and_the_next_go_on_whole() -> None:
    driver = driver_of(max_filtered_per_step=1)
    driver.request(0)
    driver.finish_group(0, 0, (1.0, 1.0))
    driver.finish_group(1, 0, (1.0, 1.0))
    assert [ticket.sample_id for ticket in driver.group(1)] == [6, 7]
    driver.finish_group(1, 0, (1.0, 1.0))
    assert driver.core.groups.ready == 1


def test_one_of_the_first_that_fails_for_good_is_replaced_by_the_next() -> None:
    driver = driver_of(max_attempts=1, redundant_episodes=1)
    driver.fail(driver.group(0)[0])
    assert [ticket.sample_id for ticket in driver.group(0)] == [1, 2]
    driver.finish_group(0, 0, (1.0, 0.0))
    assert [ticket.sample_id for ticket in driver.group(0)] == [3, 4]


def test_open_groups_keep_the_ids_of_their_samples_over_a_checkpoint() -> None:
    driver = driver_of(groups_per_batch=1, alpha=1)
    driver.request(0)
    driver.finish_group(0, 0, (1.0, 0.0))
    driver.finish_group(0, 0, (1.0, 0.0))
    driver.finish_group(1, 0, (1.0, 0.0))
    assert [ticket.sample_id for ticket in driver.group(1)] == [6, 7], "it is whole"
    driver.publish(1)

    resumed = Driver(driver.core.rules, state=driver.core.snapshot(), timeline=1)
    resumed.publish(1)
    assert [ticket.sample_id for ticket in resumed.group(1)] == [4, 5], "and begins again with its first"


@pytest.mark.parametrize("rewards", list(product((0.0, 1.0), repeat=4)))
def test_what_is_kept_depends_on_rewards_and_not_on_who_is_first(rewards: tuple[float, ...]) -> None:
    """Else fast episodes would be chosen, and with them what makes an episode fast."""
    kept = len(set(rewards[:2])) > 1
    for order in permutations(range(2)):
        for later in permutations(range(2, 4)):
            driver = driver_of(groups_per_batch=1)
            tickets = driver.group(0)
            for member in order:
                driver.finish(tickets[member], 0, rewards[member])
            rest = driver.group(0)
            assert bool(rest) == kept

            for member in later if kept else ():
                driver.finish(rest[member - 2], 0, rewards[member])
            assert driver.core.groups.ready == kept and driver.samples("settled") == (0 if kept else 2)


def test_no_gradient_of_a_task_is_turned() -> None:
    """Of a task won with probability p, exactly: E[sum of (r - mean) * score] over kept groups is a positive multiple.

    The score of an episode averages, given its reward, to grad p / p or -grad p / (1 - p), whatever else it is.
    """
    for size, first in ((4, 2), (8, 4), (8, 3)):
        for p in (0.05, 0.4, 0.9):
            total = 0.0
            for rewards in product((0.0, 1.0), repeat=size):
                if len(set(rewards[:first])) > 1:
                    mean = sum(rewards) / size
                    chance = p ** sum(rewards) * (1 - p) ** (size - sum(rewards))
                    total += chance * sum((r - mean) * (1 / p if r else -1 / (1 - p)) for r in rewards)
            assert 0 < total <= size - 1


@pytest.mark.parametrize(("size", "first", "at_once", "staged"), [(8, 4, 1.83, 1.74), (16, 4, 1.53, 1.37)])
def test_tokens_generated_for_a_trained_one_as_the_docs_have_them(
    size: int, first: int, at_once: float, staged: float
) -> None:
    """Where the success of tasks is spread like Beta(0.4, 0.4) and episodes are of equal length."""
    whole = mixed_chance(0.4, 0.4, size)
    begun = mixed_chance(0.4, 0.4, first)
    assert 1 / whole == pytest.approx(at_once, abs=0.005)
    assert (first + (size - first) * begun) / (size * begun) == pytest.approx(staged, abs=0.005)


@pytest.mark.parametrize("changes", [["rollout.first_episodes=8"], ["rollout.first_episodes=1"]])
def test_a_number_that_makes_no_sense_is_one_clear_error(changes: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.first_episodes=\d needs rollout\.filter_constant_groups=true"):
        load_config(None, ["rollout.filter_constant_groups=true", "rollout.group_size=8", *changes])
