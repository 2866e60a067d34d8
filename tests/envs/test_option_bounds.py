"""`env.options` of every registered family: numbers that cannot be meant are refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args

import pytest

from envs.registry import FAMILIES, load_family
from rl.config.plugins import validated
from rl.config.schema import ConfigError

SIGNED = {"invalid_reward", "success_reward", "success_return"}
REQUIRED: dict[str, dict[str, Any]] = {
    "dataset": {"source": "rows.jsonl", "reward": "exact"},
    "gymnasium": {"id": "FrozenLake-v1"},
    "openenv": {"url": "http://127.0.0.1:1"},
    "reasoning_gym": {"dataset": "chain_sum"},
    "mixture": {"members": {"words": {"env": "math"}}},
}
MAY_BE_NONE = {"history", "mean_s", "sigma_s", "eval_count", "eval_tasks", "progress_reward", *SIGNED}


def numbers() -> Iterator[tuple[str, str]]:
    for family in FAMILIES:
        for name, field in load_family(family).Options.model_fields.items():
            kinds = get_args(field.annotation) if isinstance(field.annotation, UnionType) else [field.annotation]
            if {int, float} & {*kinds}:
                yield family, name


@pytest.mark.parametrize(("family", "name"), list(numbers()))
def test_absurd_numbers_are_refused_by_name(family: str, name: str) -> None:
    wrong: list[float] = [1 << 60, 1e300, -1e300, math.inf, -math.inf, math.nan]
    wrong += [] if name in SIGNED else [-1]
    wrong += [] if name in MAY_BE_NONE or name.endswith("_probability") else [0]
    for value in wrong:
        with pytest.raises(ConfigError, match=rf"env\.options\.{name}="):
            validated(load_family(family).Options, REQUIRED.get(family, {}) | {name: value}, "env.options")


@pytest.mark.parametrize("name", ["workers", "threads", "sandboxes", "sessions", "memory_mb"])
def test_more_than_any_machine_has_is_refused(name: str) -> None:
    having = [family for family in FAMILIES if name in load_family(family).Options.model_fields]
    for family in having:
        with pytest.raises(
            ConfigError, match=rf"env\.options\.{name}=100000000: lower it: no number here is larger than"
        ):
            validated(load_family(family).Options, REQUIRED.get(family, {}) | {name: 100_000_000}, "env.options")
    assert having


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("dataset", {"reward": {"exact": math.nan}}, "reward.exact=nan"),
        ("dataset", {"reward": {"exact": True}}, "reward.exact=True"),
        (
            "dataset",
            {"reward": "judge", "judge": {"url": "http://x", "model": "m", "best": math.inf}},
            "judge.best=inf",
        ),
        ("mixture", {"members": {"words": {"env": "math", "weight": math.inf}}}, "members.words.weight=inf"),
        ("mixture", {"members": {"words": {"env": "math", "max_turns": True}}}, "members.words.max_turns=True"),
        ("mixture", {"members": {"words": {"env": "math", "max_tokens": 1 << 60}}}, "members.words.max_tokens="),
    ],
)
def test_numbers_within_options_have_the_same_bounds(family: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"env.options.{named}"):
        validated(load_family(family).Options, REQUIRED[family] | options, "env.options")
