"""Families by name, their options, and the synthetic family's determinism."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from envs.registry import validate_env
from envs.synthetic import SyntheticFamily, SyntheticOptions, text_reward
from rl.config.schema import ConfigError, load_config
from tests.envs.errors import raises_one_line


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.name=mth"], "env.name='mth' is not a registered name; did you mean 'math'?"),
        (
            ["env.name=envs.synthetic:Nothing"],
            "env.name='envs.synthetic:Nothing' cannot be imported: no 'Nothing' in it",
        ),
        (["env.name=nowhere:Family"], "No module named 'nowhere'"),
        (["env.name=synthetic", "env.options.turn=3"], "unknown key 'env.options.turn'; did you mean 'turns'?"),
        (["env.name=synthetic", "env.options.turns=0"], "env.options.turns=0: Input should be greater"),
        (
            ["env.name=math", "env.options.source=/no/such.jsonl"],
            "env.options of env.name='math': /no/such.jsonl cannot be read: no such file; source and eval_source name",
        ),
        (["env.name=synthetic", "eval.tasks=100"], "only 64 held-out tasks"),
    ],
)
def test_errors_are_one_line(overrides: list[str], message: str) -> None:
    with raises_one_line(ConfigError, message):
        validate_env(load_config(None, overrides))


def test_validate_env() -> None:
    assert validate_env(load_config(None, ["env.name=synthetic", "env.options.tasks=7"]))[:2] == (7, 64)


def test_a_dry_run_makes_no_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESCO_CACHE", str(tmp_path))
    overrides = [
        "env.name=alfworld",
        "env.max_turns=12",
        "env.options.games={train: 300, valid_unseen: 64}",
        "eval.tasks=64",
    ]
    assert validate_env(load_config(None, overrides), dry=True)[:2] == (300, 64)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"eval\.tasks=65"):
        validate_env(load_config(None, [*overrides, "eval.tasks=65"]), dry=True)


def test_synthetic_is_a_function_of_seed_task_and_turn() -> None:
    async def prompts(seed: int) -> list[str]:
        family = SyntheticFamily(SyntheticOptions(turns=2), seed)
        seen = []
        for index in (0, 1, 0):
            environment = family.make()
            (opening,) = await environment.reset(family.task("train", index))
            step = await environment.step("2 3")
            seen.append(opening.content + " / " + step.messages[0].content)
        return seen

    first, other, again = asyncio.run(prompts(1))
    assert first == again != other
    assert asyncio.run(prompts(1)) == [first, other, again] and asyncio.run(prompts(2))[0] != first


def test_synthetic_faults_differ_between_visits() -> None:
    async def outcomes() -> list[bool]:
        family = SyntheticFamily(SyntheticOptions(fail_probability=0.5), 0)
        seen = []
        for _ in range(40):
            environment = family.make()
            await environment.reset(family.task("train", 0))
            try:
                seen.append((await environment.step("1")).done)
            except RuntimeError:
                seen.append(False)
        return seen

    failures = asyncio.run(outcomes()).count(False)
    assert 10 < failures < 30


def test_text_reward() -> None:
    assert text_reward("2 3 4 5") == 0.5 and text_reward("") == 0.0
    assert 0 <= text_reward("words and " + "9" * 9999) <= 1
