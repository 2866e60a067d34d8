"""Which tasks fail: types with their intervals, and the tasks that are solved least."""

from __future__ import annotations

import math
from typing import Any

import pytest

from launch.report.tasks import task_facts, types_of
from rl.observe.intervals import over_tasks, wilson


def row(version: int, task: int, success: float, kind: str = "heat") -> dict[str, Any]:
    info = {f"success_{kind}": success}
    return {"version": version, "task_index": task, "success": success, "reward": success / 2, "info": info}


def kept(task: int, success: bool, **more: Any) -> dict[str, Any]:
    told = {"kind": "train", "task_index": task, "success": success, "reward": float(success), "unrewarded": ""}
    return told | {"info": {}} | more


def test_types_are_told_by_the_environment_also_in_a_mixture() -> None:
    assert types_of({"success_add": 1.0, "correct": 1.0}) == ["add"]
    assert types_of({"sums/success_add": 0.0, "sums/boxed": 1.0}) == ["sums: add"]
    assert types_of({"turns": 2.0}, "lake") == ["lake"] and types_of({"turns": 2.0}) == []


def test_the_worst_type_comes_first_with_the_interval_of_the_last_evaluation() -> None:
    evals = [row(version, task, float(task < version), "cool") for version in (0, 2) for task in range(4)]
    evals += [row(version, task, 1.0) for version in (0, 2) for task in range(4, 7)]
    facts = task_facts(evals, [])
    cool, heat = facts["types"]
    assert (cool["type"], cool["tasks"], cool["success"], cool["first"]) == ("cool", 4, 0.5, 0.0)
    assert (cool["low"], cool["high"]) == pytest.approx(wilson(2, 4))
    assert (heat["type"], heat["tasks"], heat["success"]) == ("heat", 3, 1.0) and heat["low"] < 1 == heat["high"]
    assert facts["versions"] == [0, 2]


def test_tasks_are_hard_by_the_newest_evaluations_and_by_what_was_trained() -> None:
    evals = [row(version, task, float(task == 1 or version == 0)) for version in (0, 1, 2, 3) for task in range(3)]
    episodes = [kept(7, False), kept(7, False), kept(8, False), kept(9, True), kept(5, True), kept(5, False)]
    episodes += [kept(6, False, unrewarded="judge raised"), kept(4, False, kind="eval")]
    hardest = task_facts(evals, episodes)["hardest"]
    assert [(each["task"], each["tries"], each["solved"]) for each in hardest["eval"]] == [(0, 3, 0), (2, 3, 0)]
    assert [(each["task"], each["solved"], each["tries"]) for each in hardest["train"]] == [
        (7, 0, 2),
        (8, 0, 1),
        (5, 1, 2),
    ]


def test_nothing_was_evaluated() -> None:
    assert task_facts([], []) == {"types": [], "versions": [], "hardest": {"eval": [], "train": []}}


def test_samples_of_one_task_are_not_independent() -> None:
    assert over_tasks([1.0, 0.0, 1.0, 1.0]) == pytest.approx((0.75, *wilson(3, 4))), "one sample a task is Wilson's"
    assert over_tasks([1.0] * 5) == pytest.approx((1.0, *wilson(5, 5)))
    assert over_tasks([]) == (0.0, 0.0, 1.0)

    # Sixteen samples of each of four tasks: as good as four trials where tasks differ, better where they are alike.
    mean, low, high = over_tasks([0.0, 1.0, 0.0, 1.0])
    assert (low, high) == pytest.approx(wilson(2, 4)) and mean == 0.5
    alike = over_tasks([0.5, 0.6, 0.4, 0.5])
    assert alike[2] - alike[1] < (high - low) / 2
    spread = math.sqrt((0.01 + 0.01) / 3 / 4)
    assert alike[2] - 0.5 == pytest.approx(1.96 * spread, rel=0.05), "the spread between tasks decides"
