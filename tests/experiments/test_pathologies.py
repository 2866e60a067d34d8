"""Pathologies: every alarm that is to name one exists, folders do not tell, and one of them is named in a real run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.pathologies.__main__ import as_expected, play, table
from experiments.pathologies.cases import CASES, CLEAN, RUNS
from experiments.pathologies.recipes import RECIPES, nearest
from experiments.pathologies.spoilt import SPOILT
from rl.config.recipes import find_recipe
from rl.config.schema import load_config
from rl.observe.alarms import ALARMS


def test_the_ten_are_well_formed() -> None:
    assert len(CASES) == 10 and len(set(RUNS.values())) == 12
    for case in (*CASES, *CLEAN):
        load_config(find_recipe(case.recipe), list(case.overrides))
        assert ALARMS.keys() >= set(case.alarms) and bool(case.alarms) == (case in CASES)
        assert case.spoilt is None or case.spoilt[2] in SPOILT


def test_the_recipes_are_played_with_their_own_limits() -> None:
    assert len({case.name for case in RECIPES}) == len(RECIPES) >= 20
    for case in RECIPES:
        played = load_config(find_recipe(case.recipe), list(case.overrides))
        assert played.alarms == load_config(find_recipe(case.recipe)).alarms and not case.alarms


def test_how_near_a_run_came_is_what_held_for_three_steps(tmp_path: Path) -> None:
    config = load_config(find_recipe("math_cpu"))
    kl = [0.001, 0.9, 0.9, 0.002, 0.003, 0.004, 0.001]
    row = {"loss/token_staleness": 2.0, "loss/ess": 0.9, "loss/entropy": 0.5}
    rows = [json.dumps(row | {"loss/kl_behavior": each}) for each in kl]
    (tmp_path / "metrics.jsonl").write_text("\n".join(['{"eval/accuracy": 1.0}', *rows]) + "\n")
    found = nearest(tmp_path, config)
    assert found["kl"] == {"worst": 0.002, "limit": 1.0}, "0.9 did not last"
    assert found["step_kl"]["worst"] == 0.002 / 2**2 and found["ess"]["worst"] == 0.9


@pytest.mark.parametrize("code, alarms, expected", [(0, [], True), (1, [], False), (0, [{"alarm": "clock"}], False)])
def test_a_clean_run_ends_well_and_raises_nothing(code: int, alarms: list[dict[str, str]], expected: bool) -> None:
    assert as_expected({"exit_code": code, "raised": alarms, "trained": {}}) is expected


@pytest.mark.docs
def test_a_slow_server_is_named(tmp_path: Path) -> None:
    (slow,) = [case for case in CASES if case.name == "slow-server"]
    result = play(replace(slow, overrides=(*slow.overrides, "steps=8", "eval.tasks=0")), tmp_path)
    assert result["exit_code"] == 0 and result["named"]["alarm"] == "slow-server"
    assert "env_server.1" in result["named"]["detail"] and result["named"]["step"] <= 8
    assert (tmp_path / RUNS["slow-server"] / "alarms.jsonl").exists()
    assert f"| `slow-server` | {result['named']['step']} |" in table([result])


@pytest.mark.docs
def test_a_dead_generator_is_named_for_what_killed_it(tmp_path: Path) -> None:
    """Not for an error of its own while it starts."""
    (dead,) = [case for case in CASES if case.name == "dead-generator"]
    result = play(replace(dead, overrides=(*dead.overrides, "steps=40", "eval.tasks=0")), tmp_path)
    assert result["exit_code"] == 0 and "generator.1 killed by SIGKILL" in result["named"]["detail"]
