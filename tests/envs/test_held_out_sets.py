"""Held-out sets by name: several in one run, beside the run's own, and nothing of training changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.data import data_of
from envs.held_out_sets import HeldOutSets
from envs.registry import make_family, validate_env
from rl.config.schema import ConfigError, load_config
from tests.envs.playing import episode, with_family


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i} and {i}?", "answer": 2 * i}) + "\n" for i in range(3)))
    return path


def sets(rows: Path) -> list[str]:
    return [
        "env.name=math",
        "env.options.eval_count=2",
        f"eval.sets={{doubles: {rows}, more: {{eval_count: 4, instruction: Think.}}}}",
    ]


def test_sets_alternate_with_the_runs_own_and_are_told_apart(rows: Path) -> None:
    async def play(family: HeldOutSets) -> None:
        count = family.task_count("eval")
        labels = [family.task("eval", index).label for index in range(count)]
        assert labels == ["own", "doubles", "more"] * 2 + ["doubles", "more", "more"]

        opening, (step,), environment = await episode(family, family.task("eval", 4), ["\\boxed{2}"])
        assert opening[-1].content == "1 and 1?" and step.success and step.info["doubles/correct"] == 1.0
        assert environment.terms.label == "doubles"  # type: ignore[attr-defined]
        opening, _, _ = await episode(family, family.task("eval", 2), [])
        assert opening[-1].content.endswith("Think.")

    with_family(play, *sets(rows))


def test_what_is_trained_is_as_it_was(rows: Path) -> None:
    plain = load_config(None, ["env.name=math"])
    config = load_config(None, sets(rows))
    family, alone = make_family(config), make_family(plain)
    assert family.task_count("train") == alone.task_count("train")
    assert family.task("train", 7).task == alone.task("train", 7)
    assert data_of("math", family) == data_of("math", alone), "a resume may add or leave out a set"

    async def play(family: HeldOutSets) -> None:
        _, (step,), environment = await episode(family, family.task("train", 0), ["\\boxed{2}"])
        assert "correct" in step.info and environment.terms.label == ""  # type: ignore[attr-defined]

    with_family(play, *sets(rows))


def test_a_dry_run_counts_the_tasks_of_all_sets(rows: Path) -> None:
    config = load_config(None, [*sets(rows), "eval.tasks=9"])
    assert validate_env(config, dry=True)[1] == validate_env(config)[1] == 9
    with pytest.raises(ConfigError, match=r"eval.tasks=10: .* only 9 held-out tasks"):
        validate_env(load_config(None, [*sets(rows), "eval.tasks=10"]))


@pytest.mark.parametrize(
    ("env", "told", "said"),
    [
        ("math", "{own: x.jsonl}", "eval.sets.own: so are the run's own"),
        ("math", "{a: {evil_count: 3}}", "eval.sets.a"),
        ("math", "{a: no/such.jsonl}", "no/such.jsonl"),
        ("math", "{'a b': x.jsonl}", "eval.sets"),
        ("synthetic", "{a: x.jsonl}", "eval.sets.a"),
        ("tool_loop", "{a: {}}", "takes no further sets"),
    ],
)
def test_sets_that_cannot_be_used_are_one_line(env: str, told: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_family(load_config(None, [f"env.name={env}", f"eval.sets={told}"]))
    assert "\n" not in str(caught.value)
