"""What the section `algo` refuses at start: a loss that uses log-probabilities nobody computes."""

from __future__ import annotations

import pytest

from algos.registry import NoOptions
from algos.types import LossInputs, LossResult
from rl.config.schema import load_config
from rl.learner.algorithm import make_algorithm


def anchored(inputs: LossInputs, options: NoOptions) -> LossResult:
    return LossResult(inputs.masked(inputs.logp_current - inputs.logp_proximal))  # type: ignore[operator]


def referenced(inputs: LossInputs, options: NoOptions) -> LossResult:
    return LossResult(inputs.masked(inputs.logp_current - inputs.logp_reference))  # type: ignore[operator]


@pytest.mark.parametrize(
    "loss, missing, fix, override",
    [
        ("anchored", "logp_proximal", "needs_proximal=True", "algo.correction.weight=token"),
        ("referenced", "logp_reference", "algo.kl.coef", "algo.kl.coef=0.01"),
    ],
)
def test_logprobs_that_nobody_computes(loss: str, missing: str, fix: str, override: str) -> None:
    chosen = f"algo.loss=tests.rl.learner.test_algorithm:{loss}"
    with pytest.raises(ValueError, match=f"{loss}' uses {missing}, which nothing here computes: .*{fix}"):
        make_algorithm(load_config(None, [chosen]))
    assert make_algorithm(load_config(None, [chosen, override])).loss.spec.name.endswith(loss)


def without_gradient(inputs: LossInputs, options: NoOptions) -> LossResult:
    return LossResult(inputs.masked(inputs.advantages))


def test_a_loss_that_cannot_be_trained_is_refused_before_the_run() -> None:
    with pytest.raises(ValueError, match=r"without_gradient': .* there is no gradient; fresco check-loss"):
        make_algorithm(load_config(None, [f"algo.loss={__name__}:without_gradient"]))


def test_the_proximal_policy_is_computed_for_those_that_need_it() -> None:
    def needs(*overrides: str) -> bool:
        return make_algorithm(load_config(None, list(overrides))).needs_proximal

    assert needs("algo.loss=decoupled_ppo") and needs("algo.correction.mask=token") and not needs("algo.loss=grpo")
    assert not needs("algo.loss=decoupled_ppo", "algo.options={proximal: interpolated}")


@pytest.mark.parametrize(("turns", "most"), [(1, 100), (50, 1000)])
def test_an_episode_has_no_more_tokens_than_its_context(turns: int, most: int) -> None:
    """Else a punishment of long episodes begins where none can be, and a mean over the most tokens is almost 0."""
    settings = ["sampling.max_tokens=100", "generator.max_model_len=1000", f"env.max_turns={turns}"]
    assert make_algorithm(load_config(None, settings)).max_tokens == most
