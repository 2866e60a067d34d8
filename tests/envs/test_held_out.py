"""Held-out tasks that are trained: `fresco env check` and a run judge alike, and before anything starts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from envs.check.checks import Scope
from envs.check.run import check_environment
from envs.held_out import check_held_out, seen_in_training
from envs.mixture import MixtureFamily, MixtureOptions
from envs.registry import make_family
from launch.cli import main
from rl.config.schema import ConfigError, load_config
from tests.envs.seeded_faults import Sum, SumFamily

TINY = Scope(tasks=2, openings=40, episodes=5)
HERE = "tests.envs.test_held_out"


class SmallSums(SumFamily):
    """A game of nine tasks, of which nothing can be held out."""

    def task(self, split: str, index: int) -> Any:
        return Sum(1000 + random.Random(f"{split} {index}").randrange(9), 1000)


class CopiedRows(SumFamily):
    """Each training task stands in the data twice, and half of the held-out ones are among them."""

    def task(self, split: str, index: int) -> Any:
        return Sum(1000 + (index // 2 if split == "train" else 230 + index), 1000)


@pytest.mark.parametrize(
    ("family", "options", "verdict"),
    [
        (f"{HERE}:SmallSums", "{}", "note"),
        (f"{HERE}:CopiedRows", "{}", "FAIL"),
        ("tests.envs.seeded_faults:SumFamily", "{}", "ok"),
        ("tests.envs.seeded_faults:SumFamily", "{fault: held-out tasks are trained}", "FAIL"),
    ],
)
def test_the_check_and_a_run_judge_alike(
    family: str, options: str, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [
        f"env.name={family}",
        f"env.options={options}",
        "env.max_turns=4",
        "env.step_deadline_s=30",
        "eval.tasks=40",
    ]
    config = load_config(None, asked)
    page = check_environment(config, TINY)
    assert {each.check: each.verdict for each in page.findings}["held out"] == verdict, page.text()

    try:
        check_held_out(config, make_family(config))
    except ConfigError as error:
        assert verdict == "FAIL" and "eval-on-train" in str(error)
    else:
        assert verdict != "FAIL" and ("the game has few tasks" in capsys.readouterr().err) == (verdict == "note")


def test_a_run_is_refused_before_it_has_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [f"runs={tmp_path}", f"env.name={HERE}:CopiedRows", "env.options={}", "env.max_turns=4", "eval.tasks=40"]
    assert main(["run", "experiments/simulated.yaml", *changes]) == 2
    assert "alarm eval-on-train: 50% of 40 held-out tasks are training tasks;" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_each_member_of_a_mixture_is_judged_by_itself() -> None:
    """A game of few tasks neither hides what another member trains, nor is blamed for it."""
    members = {"small": {"env": f"{HERE}:SmallSums"}, "copied": {"env": f"{HERE}:CopiedRows"}}
    family = MixtureFamily(MixtureOptions.model_validate({"members": members}), 0)
    small, copied = seen_in_training(family, 80)
    assert str(small) == "100% of 40 small's held-out tasks are training tasks; the game has few tasks"
    assert str(copied) == "50% of 40 copied's held-out tasks are training tasks"


def test_an_evaluation_alone_trains_nothing() -> None:
    config = load_config(None, [f"env.name={HERE}:CopiedRows", "eval.tasks=40", "steps=0"])
    check_held_out(config, make_family(config))
