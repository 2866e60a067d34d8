"""Held-out sets by name: several in one run, beside the run's own, and nothing of training changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from envs.data import data_of
from envs.held_out_sets import HeldOutSets
from envs.registry import make_family, validate_env
from launch.warm_start.imitation import demonstrations
from rl.config.schema import ConfigError, load_config
from rollout.episodes.environment import ChatMessage, EpisodeTerms, Opening
from tests.envs.playing import episode, with_family

MIXTURE = [
    "env.name=mixture",
    "env.options.members={sums: {env: math, eval_tasks: 1},"
    " noise: {env: synthetic, max_turns: 2, options: {tasks: 10, eval_tasks: 2, turns: 2}}}",
]


class ToolOptions(BaseModel):
    tasks: int = 2


class ToolFamily:
    """Episodes that begin with tools."""

    Options = ToolOptions
    tools = True

    def __init__(self, options: ToolOptions, seed: int) -> None:
        self.options = options

    def task_count(self, split: str) -> int:
        return self.options.tasks

    def task(self, split: str, index: int) -> int:
        return index

    async def start(self) -> None: ...

    def make(self) -> Any:
        return ToolEnvironment()

    async def stop(self) -> None: ...


class ToolEnvironment:
    async def reset(self, task: int) -> Opening:
        return Opening([ChatMessage("user", str(task))], ({"type": "function"},))

    async def close(self) -> None: ...


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


def test_a_set_of_a_mixture_is_one_more_member_that_is_not_trained(rows: Path) -> None:
    told = f"{{env: math, max_turns: 1, eval_tasks: 2, options: {{eval_source: {rows}}}}}"

    async def play(family: HeldOutSets) -> None:
        labels = [family.task("eval", index).label for index in range(family.task_count("eval"))]
        assert labels == ["sums", "doubles", "noise", "doubles", "noise"]
        assert {family.task("train", index).label for index in (0, family.task_count("train") - 1)} == {"sums", "noise"}
        opening, (step,), environment = await episode(family, family.task("eval", 3), ["\\boxed{2}"])
        assert opening[-1].content == "1 and 1?" and step.info["doubles/correct"] == 1.0
        assert environment.terms == EpisodeTerms("doubles", 1)  # type: ignore[attr-defined]
        _, _, environment = await episode(family, family.task("eval", 2), ["a"])
        assert environment.terms == EpisodeTerms("noise", 2)  # type: ignore[attr-defined]

    with_family(play, *MIXTURE, f"eval.sets={{doubles: {told}}}")
    assert data_of("mixture", make_family(load_config(None, [*MIXTURE, f"eval.sets={{doubles: {told}}}"]))) == data_of(
        "mixture", make_family(load_config(None, MIXTURE))
    )


def test_an_environment_with_tools_has_sets_too() -> None:
    overrides = ["env.name=tests.envs.test_held_out_sets:ToolFamily", "eval.sets={more: {tasks: 1}}"]

    async def play(family: HeldOutSets) -> None:
        assert family.tools and family.task_count("eval") == 3
        opening, _, environment = await episode(family, family.task("eval", 1), [])
        assert opening == Opening([ChatMessage("user", "0")], ({"type": "function"},))  # type: ignore[comparison-overlap]
        assert environment.terms.label == "more"  # type: ignore[attr-defined]

    with_family(play, *overrides)


@pytest.mark.parametrize("env", ["tool_loop", "sdk_agent"])
def test_demonstrations_are_of_the_runs_own_tasks(env: str) -> None:
    """A demonstrator knows the tasks of its environment, and no others."""
    settings = [f"env.name={env}", "model.warm_start.demonstrations=3"]
    with_sets = load_config(None, [*settings, "eval.sets={large: {largest: 50}}"])
    assert demonstrations(with_sets) == demonstrations(load_config(None, settings))


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
        ("mixture", "{a: x.jsonl}", "eval.sets.a='x.jsonl': in a mixture a set is written like a member"),
        ("mixture", "{sums: {env: math}}", "eval.sets.sums: so are the run's own"),
        ("mixture", "{a: {env: math, options: {evil_count: 3}}}", "eval.sets.a.options.evil_count"),
        ("mixture", "{a: {env: math, options: {eval_source: no/such.jsonl}}}", "eval.sets.a.options.*no/such.jsonl"),
        ("tool_loop", "{a: {largest: 1}}", "eval.sets.a.largest=1"),
    ],
)
def test_sets_that_cannot_be_used_are_one_line(env: str, told: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_family(load_config(None, [*(MIXTURE if env == "mixture" else [f"env.name={env}"]), f"eval.sets={told}"]))
    assert "\n" not in str(caught.value)
