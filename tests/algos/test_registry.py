"""Losses and advantages by name, and what is said about wrong ones."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from algos.advantages import group_normalised
from algos.conformance import random_inputs
from algos.ppo import PPOOptions, ppo
from algos.registry import (
    NoOptions,
    advantage_names,
    get_advantage,
    get_loss,
    loss_names,
    make_loss,
    parse_options,
    register_loss,
)
from algos.types import LossInputs, LossResult


@dataclass(frozen=True)
class ScaleOptions:
    scale: float = 2.0
    sign: int = 1
    cap: float | None = None


def scaled(inputs: LossInputs, options: ScaleOptions) -> LossResult:
    return LossResult(options.scale * options.sign * inputs.masked(inputs.logp_current))


def bare(inputs: LossInputs, options) -> LossResult:  # type: ignore[no-untyped-def]
    return LossResult(inputs.masked(inputs.logp_current))


def test_names() -> None:
    assert {"ppo", "grpo", "reinforce", "tis"} <= set(loss_names())
    assert {"group", "group_mean"} <= set(advantage_names())
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


def test_import_path() -> None:
    spec = get_loss("tests.algos.test_registry:scaled")
    assert spec.options is ScaleOptions and spec.name == "tests.algos.test_registry:scaled"
    inputs = random_inputs()
    per_token = make_loss(spec.name, {"scale": 3, "sign": -1})(inputs).per_token
    torch.testing.assert_close(per_token, -3 * inputs.masked(inputs.logp_current))
    assert get_loss("tests.algos.test_registry:bare").options is NoOptions
    assert get_loss("algos.ppo:ppo").options is PPOOptions
    for missing in ("no.such.module:loss", "algos.ppo:nothing", "no.such.module", "algos.ppo.nothing"):
        with pytest.raises(ValueError, match="cannot be imported"):
            get_loss(missing)


def test_dotted_path_names_a_module_or_a_function() -> None:
    assert get_loss("algos.kimi") is get_loss("algos.kimi:kimi") is get_loss("algos.kimi.kimi") is get_loss("kimi")
    assert get_loss("tests.algos.test_registry.scaled").options is ScaleOptions
    with pytest.raises(ValueError, match="registers aipo, tis: choose one by name, or write module:function"):
        get_loss("algos.tis")
    with pytest.raises(ValueError, match=r"'algos\.types': the module registers no loss, or write module:function"):
        get_loss("algos.types")


def test_options() -> None:
    spec = get_loss("tests.algos.test_registry:scaled")
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


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="'ppo' is registered twice"):
        register_loss("ppo")(bare)
