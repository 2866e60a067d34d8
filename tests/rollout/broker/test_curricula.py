"""Which tasks come again: chances known in closed form, and a population of tasks whose success is known."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rollout.broker.actions import GroupRecord
from rollout.broker.core import BrokerCore
from rollout.broker.tasks import SuccessWeighted, mixed_chance
from tests.rollout.broker.driver import Driver, rules


def record(task: int, rewards: list[float], end: str = "trained") -> GroupRecord:
    return GroupRecord(0, task, end, 0, 0, rewards, 1.0, sum(rewards) / len(rewards) if rewards else None)


def play(source: SuccessWeighted, success: dict[int, float], groups: int, seed: int = 0) -> list[tuple[int, bool]]:
    """Task and whether it was mixed, of each group in turn."""
    rng = random.Random(seed)
    played = []
    for _ in range(groups):
        task = source.next()
        rewards = [float(rng.random() < success[task]) for _ in range(8)]
        mixed = len(set(rewards)) > 1
        source.ended(record(task, rewards, "trained" if mixed else "filtered"))
        played.append((task, mixed))
    return played


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_chance_of_a_mixed_group_in_closed_form(size: int) -> None:
    """Every number of wins is equally likely under Beta(1, 1); a known success p gives 1 - p^G - (1 - p)^G."""
    assert mixed_chance(1, 1, size) == pytest.approx(1 - 2 / (size + 1))
    assert mixed_chance(3e6, 7e6, size) == pytest.approx(1 - 0.3**size - 0.7**size, rel=1e-4)


def test_a_task_is_known_better_with_every_group_and_older_groups_count_less() -> None:
    source = SuccessWeighted(run_seed=0, tasks=9, group_size=8, decay=0.5)
    new = source.chance(1)
    source.ended(record(1, [1.0] * 8, "filtered"))
    once = source.chance(1)
    source.ended(record(1, [1.0] * 8, "filtered"))
    assert source.chance(1) < once < new
    assert source.known[1] == (12.0, 0.0)

    source.ended(record(1, [1.0, 0.0] * 4))
    assert source.known[1] == (10.0, 4.0) and source.chance(1) > new


def test_what_was_cut_off_says_nothing_of_a_task() -> None:
    source = SuccessWeighted(run_seed=0, tasks=9, group_size=8)
    for end in ("stale", "redundant", "failed"):
        source.ended(record(3, [0.0, 0.0], end))
    source.ended(record(4, [], "failed"))
    assert not source.known

    source.ended(record(3, [0.0, 0.0], "settled"))
    assert source.known == {3: (0.0, 2.0)}


def test_half_of_the_tasks_teach_nothing_and_three_quarters_of_the_groups_do() -> None:
    """Half are never or always won, half every other time: shuffled, half of the groups are constant."""
    success = {task: (0.0, 0.5, 1.0, 0.5)[task % 4] for task in range(2000)}
    shuffled = play(SuccessWeighted(run_seed=1, tasks=2000, group_size=8, target=0.0), success, 800)
    assert sum(mixed for _, mixed in shuffled) < 0.55 * 800

    played = play(SuccessWeighted(run_seed=1, tasks=2000, group_size=8), success, 800)
    assert sum(mixed for _, mixed in played[200:]) > 0.75 * 600
    again = Counter(task for task, _ in played)
    assert all(count < 3 for task, count in again.items() if success[task] != 0.5)


def test_a_task_rests_and_comes_again_only_while_too_few_groups_are_mixed() -> None:
    source = SuccessWeighted(run_seed=1, tasks=100, group_size=8, rest=5, target=0.5)
    first = source.next()
    source.ended(record(first, [1.0, 0.0] * 4))
    drawn = [source.next() for _ in range(5)]
    assert drawn[4] == first and first not in drawn[:4]

    satisfied = SuccessWeighted(run_seed=1, tasks=100, group_size=8, rest=5, target=0.0)
    satisfied.ended(record(satisfied.next(), [1.0, 0.0] * 4))
    assert first not in [satisfied.next() for _ in range(99)], "every other task once"


def test_tasks_come_again_in_a_share_of_the_draws_alone() -> None:
    success = dict.fromkeys(range(2000), 0.5) | {task: 1.0 for task in range(0, 2000, 2)}
    played = play(SuccessWeighted(run_seed=1, tasks=2000, group_size=8, target=1.0, repeat=0.25), success, 400)
    again = len(played) - len({task for task, _ in played})
    assert 0.2 * 400 < again <= 0.25 * 400


def test_what_is_learned_by_heart_is_not_played_over_and_over() -> None:
    """Each group of a task that was mixed makes it one that is always won, which no posterior of its past can tell."""
    source = SuccessWeighted(run_seed=1, tasks=2000, group_size=8, target=1.0, repeat=1.0, rest=8)
    seen: Counter[int] = Counter()
    for _ in range(400):
        task = source.next()
        source.ended(record(task, [1.0] * 8 if seen[task] else [1.0, 0.0] * 3 + [1.0] * 2))
        seen[task] += 1
    assert len(seen) > 0.8 * 400


def test_a_later_pass_takes_known_tasks_by_their_chance_and_never_less_often_than_the_floor() -> None:
    source = SuccessWeighted(run_seed=3, tasks=10, group_size=8, floor=0.05, decay=0.98, target=0.0)
    for task in range(10):
        for _ in range(40):
            source.ended(record(task, [1.0] * 8 if task < 5 else [1.0, 0.0] * 4))
    drawn = [source.next() for _ in range(1000)]
    solved = sum(task < 5 for task in drawn) / len(drawn)
    assert 0.02 < solved < 0.09  # 0.05 / 1.05
    assert source.skipped > 0


def test_it_goes_on_from_its_snapshot() -> None:
    success = {task: task / 30 for task in range(30)}
    one, other = (SuccessWeighted(run_seed=3, tasks=30, group_size=8, rest=2) for _ in range(2))
    play(one, success, 50)
    other.restore(one.state())
    assert play(one, success, 100, seed=5) == play(other, success, 100, seed=5)


def test_its_state_is_part_of_the_journal() -> None:
    config = rules(group_size=1, curriculum="success")
    driver = Driver(config)
    driver.publish(0)
    driver.request(0)
    for ticket in list(driver.live.values()):
        driver.finish(ticket, 0)
    driver.publish(1)
    state = driver.core.snapshot()
    resumed = Driver(config, state=state, timeline=1)
    assert resumed.core.groups.tasks.source.state()["known"] == state["tasks"]["source"]["known"] != []
    with pytest.raises(ValueError, match=r"another rollout\.curriculum"):
        BrokerCore(rules(group_size=1)).restore(state)
