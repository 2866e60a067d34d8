"""Reward functions: what is named by `env.options.reward`, and those that come with Fresco.

    def my_reward(response: str, row: dict[str, Any]) -> float | None: ...

None is no opinion. `row` is the row of the data set. A function may block, hang or crash: it runs in worker processes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from envs.answers import answer_of, tagged
from rl.config.plugins import check_call, load

EXACT = "exact"
JUDGE = "judge"
"""The name of the judge among the rewards; it is asked by the environment server itself."""
RewardFunction = Callable[[str, dict[str, Any]], float | None]


def exact(response: str, row: dict[str, Any]) -> float:
    """1 if the row's `answer` is what stands in the last <answer>, or else is the whole response; white space aside."""
    response = answer_of(response)
    said = tagged(response, "answer")
    return float(" ".join((response if said is None else said).split()) == " ".join(str(row["answer"]).split()))


REWARDS: dict[str, RewardFunction] = {EXACT: exact}


def load_reward(name: str) -> RewardFunction:
    """Raises ConfigError, one line."""
    function: RewardFunction = load("env.options.reward", name, REWARDS)
    check_call(f"env.options.reward={name!r}: {name.rpartition(':')[2]}", function, "response", {})
    return function


def score(function: RewardFunction, response: str, row: dict[str, Any]) -> float | None:
    """What the function says. Raises ValueError where that is no finite number, and what the function raises."""
    said = function(response, dict(row))
    if said is None:
        return None
    value = float(said)
    if not math.isfinite(value):
        raise ValueError(f"a reward of {value}")
    return value


def row_as_json(values: Mapping[str, Any]) -> str:
    """The row as JSON, for the way to a worker: what JSON does not know, such as a date, becomes text."""
    return json.dumps(dict(values), default=str, ensure_ascii=False, sort_keys=True)
