"""Losses and advantages by name, and what is said about wrong ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from algos.advantages import group_normalised
from algos.conformance import random_inputs
from algos.kimi import kimi
from algos.ppo import PPOOptions, ppo
from algos.registry import (
    NoOptions,
    get_advantage,
    get_loss,
    make_loss,
    parse_options,
    register_loss,
    registered,
)
from algos.types import LossInputs, LossResult


@dataclass(frozen=True)
class ScaleOptions:
    scale: float = 2.0
    sign: int = 1
    cap: float | None = None
    of: Literal["token", "sequence"] = "token"


def scaled(inputs: LossInputs, options: ScaleOptions) -> LossResult:
    return LossResult(options.scale * options.sign * inputs.masked(inputs.logp_current))


def bare(inputs: LossInputs, options) -> LossResult:  # type: ignore[no-untyped-def]
    return LossResult(inputs.masked(inputs.logp_current))


def test_names() -> None:
    assert {"ppo", "grpo", "reinforce", "tis"} <= set(registered("loss"))
    assert {"group", "group_mean"} <= set(registered("advantage"))
    assert get_loss("grpo").function is ppo and get_loss("grpo").options is PPOOptions
    assert get_advantage("group").function is group_normalised


@pytest.mark.parametrize(
    "wrong, message", [("grppo", r"unknown loss 'grppo'; did you mean 'grpo'\?"), ("zzz", "known: .*ppo, reinforce")]
)
def test_unknown_loss_names_the_nearest(wrong: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_loss(wrong)


def test_unknown_advantage_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown advantage 'grop'; did you mean 'group'\?"):
        get_advantage("grop")


def test_a_function_of_the_users_own() -> None:
    spec = get_loss(scaled)
    assert spec.options is ScaleOptions and spec.name == "tests.algos.test_registry:scaled"
    inputs = random_inputs()
    per_token = make_loss(scaled, {"scale": 3, "sign": -1})(inputs).per_token
    torch.testing.assert_close(per_token, -3 * inputs.masked(inputs.logp_current))
    assert get_loss(bare).options is NoOptions


def test_a_registered_function_comes_with_what_it_was_registered_with() -> None:
    assert get_loss(kimi) is get_loss("kimi") is get_loss(get_loss("kimi"))
    assert get_loss(ppo).options is PPOOptions


def test_options() -> None:
    spec = get_loss(scaled)
    assert parse_options(spec, {}) == ScaleOptions()
    assert parse_options(spec, {"scale": 1, "cap": 5}) == ScaleOptions(1.0, 1, 5.0)
    assert parse_options(spec, {"cap": None}) == ScaleOptions()
    with pytest.raises(ValueError, match=r"has no option 'scael'; did you mean 'scale'\?"):
        parse_options(spec, {"scael": 1.0})
    with pytest.raises(ValueError, match="loss 'reinforce' has no option 'cap'; known: none"):
        parse_options(get_loss("reinforce"), {"cap": 1.0})
    for wrong in ({"scale": "big"}, {"scale": True}, {"sign": 1.5}, {"scale": None}):
        with pytest.raises(ValueError, match=f"option '{next(iter(wrong))}' of loss .* must be"):
            parse_options(spec, wrong)
    with pytest.raises(ValueError, match=r"option 'of' of loss .* must be 'token' or 'sequence', not 'word'"):
        parse_options(spec, {"of": "word"})


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'ppo' is registered twice"):
        register_loss("ppo")(bare)
