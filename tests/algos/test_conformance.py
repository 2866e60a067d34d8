"""Every registered loss passes every check - a new file in `algos` is picked up by itself - and each check can fail."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from algos.conformance import CHECKS, check_loss, untrainable
from algos.correction import Correction
from algos.registry import Loss, LossSpec, NoOptions, make_loss, registered
from algos.types import LossInputs, LossResult

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in registered("loss")),
    ("ppo", {"dual_clip": 3.0}),
    ("decoupled_ppo", {"proximal": "interpolated"}),
    ("topr", {"ratio": "token"}),
    ("cispo", {"clip_low": 0.5}),
    ("reverse_kl", {"rewards": 1.0}),
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name, options", VARIANTS, ids=lambda value: str(value) if value else "")
def test_every_loss(name: str, options: dict[str, Any], check: str) -> None:
    assert CHECKS[check](make_loss(name, options)) == ""


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "correction",
    [
        Correction(mask="none", weight="token", cap=2.0),
        Correction(mask="none", weight="sequence", cap=2.0),
        Correction(mask="token", weight="token", cap=2.0, low=0.5, high=2.0),
        Correction(weight="none", mask="sequence", low=0.2, high=5),
        Correction(weight="none", mask="geometric", low=0.9, high=1.1),
    ],
    ids=lambda c: f"{c.weight}-{c.mask}",
)
@pytest.mark.parametrize("name", ["reinforce", "ppo", "gspo"])
def test_every_correction(name: str, correction: Correction, check: str) -> None:
    inner = make_loss(name, {})

    def corrected(inputs: LossInputs, options: NoOptions) -> LossResult:
        return correction(inputs, inner)

    assert CHECKS[check](Loss(LossSpec(name, corrected, NoOptions, needs_proximal=True), NoOptions())) == ""


@dataclass(frozen=True)
class Bad:
    """Losses that are wrong, each in one way that one check finds."""

    @staticmethod
    def declared(inputs: LossInputs) -> LossResult:
        assert inputs.logp_proximal is not None
        return LossResult(inputs.masked(-inputs.advantages * inputs.masked(inputs.logp_current)))

    @staticmethod
    def finite(inputs: LossInputs) -> LossResult:
        ratio = (inputs.logp_current - inputs.logp_behavior).exp()
        return LossResult(inputs.masked(-inputs.advantages * ratio**60))

    @staticmethod
    def masked_tokens(inputs: LossInputs) -> LossResult:
        return LossResult(-inputs.advantages * inputs.logp_current)

    @staticmethod
    def cuts(inputs: LossInputs) -> LossResult:
        advantages = inputs.advantages - inputs.masked(inputs.advantages).mean()
        return LossResult(inputs.masked(-advantages * inputs.masked(inputs.logp_current)))

    @staticmethod
    def direction(inputs: LossInputs) -> LossResult:
        return LossResult(inputs.masked(inputs.advantages * inputs.masked(inputs.logp_current)))

    @staticmethod
    def nothing_generated(inputs: LossInputs) -> LossResult:
        return LossResult(inputs.logp_current * 0 + 1)

    @staticmethod
    def no_signal(inputs: LossInputs) -> LossResult:
        return LossResult(inputs.masked((-inputs.advantages - 0.1) * inputs.masked(inputs.logp_current)))

    @staticmethod
    def metrics(inputs: LossInputs) -> LossResult:
        loss = inputs.masked(-inputs.advantages * inputs.masked(inputs.logp_current))
        return LossResult(loss, {"mean": loss.mean()})


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_can_fail(check: str) -> None:
    wrong = getattr(Bad, check)
    spec = LossSpec("bad", lambda inputs, _: wrong(inputs), NoOptions)
    findings = {finding.check: finding.problem for finding in check_loss(Loss(spec, NoOptions()))}
    assert findings.keys() == CHECKS.keys() and findings[check]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (lambda inputs: inputs.logp_current, "it returns a Tensor, not a LossResult"),
        (lambda inputs: LossResult(inputs.logp_current.mean()), r"per_token has shape \(\), not one value per token"),
        (lambda inputs: LossResult(inputs.logp_current[:1]), r"per_token has shape \(1,\), not one value per token"),
        (lambda inputs: LossResult(inputs.masked(inputs.advantages)), "there is no gradient"),
        (lambda inputs: LossResult(inputs.logp_current, {"mine": torch.ones(3)}), r"metric 'mine' has shape \(3,\)"),
        (lambda inputs: LossResult(inputs.logp_current, {"mine": cast(Any, 1.0)}), r"metric 'mine' has shape \(\)"),
    ],
)
def test_a_result_that_nothing_can_be_trained_with(wrong: Callable[[LossInputs], Any], problem: str) -> None:
    """It is told before a run, and by the command that tries a loss; neither ends in an error of torch."""
    loss = Loss(LossSpec("bad", lambda inputs, _: wrong(inputs), NoOptions), NoOptions())
    assert re.search(problem, untrainable(loss, {}))
    assert any(re.search(problem, finding.problem) for finding in check_loss(loss))
