"""Losses against the papers' formulas, written here a second time in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from algos.conformance import PROXIMAL_OFFSET, gradient, grid, inputs_of, on_policy, random_inputs
from algos.registry import make_loss, registered
from algos.types import LossInputs

Token = tuple[float, float, float, int]  # current, behavior, advantage, staleness
Reference = Callable[[list[Token], float], list[tuple[float, float]]]
"""The generated tokens of one sample and its reward -> (loss, d loss / d current) of each token.

For losses of whole sequences the derivative is that of the sum of the sample's losses."""


def by_token(loss: Callable[[float, float, float], tuple[float, float]]) -> Reference:
    return lambda tokens, reward: [loss(current, behavior, advantage) for current, behavior, advantage, _ in tokens]


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> tuple[float, float]:
    """Value and d value / d log ratio."""
    plain = ratio * advantage
    objective = min(plain, min(max(ratio, 1 - low), 1 + high) * advantage)
    slope = plain if objective == plain else 0.0
    if dual is not None and advantage < 0 and objective < dual * advantage:
        objective = dual * advantage
        slope = 0.0
    return -objective, -slope


def ppo(low: float, high: float, dual: float | None) -> Reference:
    return by_token(lambda current, behavior, a: clipped(math.exp(current - behavior), a, low, high, dual))


def weighted(weight: Callable[[float], float]) -> Reference:
    """-sg(weight(r)) A log pi: a weighted policy gradient."""

    def loss(current: float, behavior: float, advantage: float) -> tuple[float, float]:
        factor = weight(math.exp(current - behavior))
        return -factor * advantage * current, -factor * advantage

    return by_token(loss)


def taught(rewards: float, cap: float) -> Reference:
    def loss(current: float, behavior: float, advantage: float) -> tuple[float, float]:
        teacher = current + advantage
        slope = -min(math.exp(current - behavior), cap) * (teacher - current + rewards * advantage)
        return slope * current, slope

    return by_token(loss)


def decoupled(cap: float) -> Reference:
    def loss(current: float, behavior: float, advantage: float) -> tuple[float, float]:
        value, slope = clipped(math.exp(current - behavior - PROXIMAL_OFFSET), advantage, 0.2, 0.2, None)
        weight = min(math.exp(PROXIMAL_OFFSET), cap)
        return weight * value, weight * slope

    return by_token(loss)


def interpolated(tokens: list[Token], reward: float) -> list[tuple[float, float]]:
    found = []
    for current, behavior, advantage, staleness in tokens:
        proximal = behavior + staleness / (staleness + 1) * (current - behavior)
        value, slope = clipped(math.exp(current - proximal), advantage, 0.2, 0.2, None)
        weight = min(math.exp(proximal - behavior), 5.0)
        found.append((weight * value, weight * slope))
    return found


def gspo(tokens: list[Token], reward: float) -> list[tuple[float, float]]:
    """Every token carries its sequence's loss; the derivative of their sum / length falls evenly on all tokens."""
    ratio = math.exp(sum(current - behavior for current, behavior, _, _ in tokens) / max(1, len(tokens)))
    return [clipped(ratio, advantage, 3e-4, 4e-4, None) for _, _, advantage, _ in tokens]


def topr(level: str, positive: float = 1.0, negative: float = 1.0) -> Reference:
    def loss(tokens: list[Token], reward: float) -> list[tuple[float, float]]:
        whole = sum(current - behavior for current, behavior, _, _ in tokens)
        found = []
        for current, behavior, advantage, _ in tokens:
            log_ratio = whole if level == "sequence" else current - behavior
            weight = positive if advantage >= 0 else negative * min(1.0, math.exp(log_ratio))
            found.append((-weight * advantage * current, -weight * advantage))
        return found

    return loss


def kimi(tau: float) -> Reference:
    return by_token(
        lambda current, behavior, a: (
            -a * current + tau / 2 * (current - behavior) ** 2,
            -a + tau * (current - behavior),
        )
    )


def sapo(current: float, behavior: float, advantage: float) -> tuple[float, float]:
    ratio = math.exp(current - behavior)
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1))) if tau * (ratio - 1) > -700 else 0.0
    return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio * advantage


def m2po(threshold: float) -> Reference:
    """Leave out the furthest pulled token, one at a time, until the rest is within the bound."""

    def loss(tokens: list[Token], reward: float) -> list[tuple[float, float]]:
        kept = set(range(len(tokens)))
        square = [(current - behavior) ** 2 for current, behavior, _, _ in tokens]
        pulled = {i for i, (current, behavior, a, _) in enumerate(tokens) if a * (current - behavior) > 0}
        while kept & pulled and sum(square[i] for i in kept) / len(kept) > threshold:
            kept.remove(max(kept & pulled, key=lambda i: square[i]))
        surrogate = [-math.exp(current - behavior) * a for current, behavior, a, _ in tokens]
        return [(value, value) if i in kept else (0.0, 0.0) for i, value in enumerate(surrogate)]

    return loss


PPO = ppo(0.2, 0.2, None)
CASES: list[tuple[str, dict[str, Any], Reference]] = [
    ("ppo", {}, PPO),
    ("grpo", {}, PPO),
    ("dr_grpo", {}, PPO),
    ("reinforce_pp", {}, PPO),
    ("dapo", {}, ppo(0.2, 0.28, None)),
    ("ppo", {"clip_low": 0.3, "clip_high": 0.28}, ppo(0.3, 0.28, None)),
    ("ppo", {"clip_high": 0.28, "dual_clip": 3}, ppo(0.2, 0.28, 3.0)),
    ("reinforce", {}, weighted(lambda ratio: 1.0)),
    ("rloo", {}, weighted(lambda ratio: 1.0)),
    ("decoupled_ppo", {}, decoupled(5.0)),
    ("decoupled_ppo", {"cap": 1.02}, decoupled(1.02)),
    ("decoupled_ppo", {"proximal": "interpolated"}, interpolated),
    ("tis", {}, weighted(lambda ratio: min(ratio, 2.0))),
    ("tis", {"cap": 1.0}, weighted(lambda ratio: min(ratio, 1.0))),
    ("aipo", {}, weighted(lambda ratio: min(ratio, 4.0))),
    ("cispo", {}, weighted(lambda ratio: min(ratio, 5.0))),
    ("cispo", {"clip_low": 0.3, "clip_high": 0.2}, weighted(lambda ratio: min(max(ratio, 0.7), 1.2))),
    ("gspo", {}, gspo),
    ("topr", {}, topr("sequence")),
    ("topr", {"ratio": "token"}, topr("token")),
    ("weighted_topr", {"positive_weight": 0.5, "negative_weight": 2}, topr("sequence", 0.5, 2.0)),
    ("kimi", {}, kimi(0.1)),
    ("kimi", {"tau": 1}, kimi(1.0)),
    ("sapo", {}, by_token(sapo)),
    ("m2po", {}, m2po(0.04)),
    ("m2po", {"threshold": 5}, m2po(5.0)),
    ("m2po", {"threshold": 0.15}, m2po(0.15)),
    ("reverse_kl", {}, taught(0.0, 2.0)),  # its teacher wants what the advantages want (`algos.conformance`)
    ("reverse_kl", {"rewards": 0.5, "cap": 1}, taught(0.5, 1.0)),
]


def expected(inputs: LossInputs, reference: Reference) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.zeros_like(inputs.logp_behavior)
    slopes = torch.zeros_like(inputs.logp_behavior)
    for sample in range(inputs.n_samples):
        places = ((inputs.sample == sample) & inputs.mask).nonzero().flatten().tolist()

        tokens: list[Token] = [
            (
                float(inputs.logp_current[i].detach()),
                float(inputs.logp_behavior[i]),
                float(inputs.advantages[i]),
                int(inputs.staleness[i]),
            )
            for i in places
        ]

        for i, (value, slope) in zip(places, reference(tokens, float(inputs.rewards[sample])), strict=True):
            values[i] = value
            slopes[i] = slope
    return values, slopes


@pytest.mark.parametrize(
    "inputs", [grid(), random_inputs(), random_inputs(40, 5, seed=3)], ids=["grid", "near", "long"]
)
@pytest.mark.parametrize("name, options, reference", CASES, ids=[f"{name}{options}" for name, options, _ in CASES])
def test_value_and_gradient(name: str, options: dict[str, Any], reference: Reference, inputs: LossInputs) -> None:
    """Ratios from 1e-6 to 1e6, advantages of both signs and zero; to 12 digits."""
    result = make_loss(name, options)(inputs)
    values, slopes = expected(inputs, reference)
    torch.testing.assert_close(result.per_token.detach(), values, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(gradient(result.per_token, inputs), slopes, rtol=1e-11, atol=1e-12)


def test_every_loss_has_a_reference() -> None:
    assert {name for name, _, _ in CASES} == set(registered("loss"))


@pytest.mark.parametrize("name", registered("loss"))
def test_on_policy_all_are_the_policy_gradient(name: str) -> None:
    """Where behaviour, proximal and current policy are one, every loss is REINFORCE."""
    inputs = on_policy(grid())
    slopes = gradient(make_loss(name, {})(inputs).per_token, inputs)
    torch.testing.assert_close(slopes, -inputs.advantages)


def test_clip_fraction_counts_tokens_whose_gradient_the_clip_stops() -> None:
    inputs = grid()
    ratio = (inputs.logp_current - inputs.logp_behavior).exp()
    outside = ((ratio > 1.2) & (inputs.advantages > 0)) | ((ratio < 0.8) & (inputs.advantages < 0))
    torch.testing.assert_close(make_loss("ppo", {})(inputs).metrics["clip_fraction"], outside.float())
    dual = make_loss("ppo", {"dual_clip": 3})(inputs)
    stopped = (gradient(dual.per_token, inputs) == 0) & (inputs.advantages != 0)
    torch.testing.assert_close(dual.metrics["clip_fraction"], stopped.float())


@pytest.mark.parametrize(
    "name, options",
    [
        ("ppo", {"clip_low": 1.5}),
        ("ppo", {"clip_high": -0.1}),
        ("ppo", {"dual_clip": 0.5}),
        ("decoupled_ppo", {"cap": -1.0}),
        ("decoupled_ppo", {"proximal": "guessed"}),
        ("tis", {"cap": 0.0}),
        ("cispo", {"clip_low": 2.0}),
        ("topr", {"ratio": "word"}),
        ("weighted_topr", {"negative_weight": -1.0}),
        ("kimi", {"tau": -0.1}),
        ("sapo", {"tau_negative": 0.0}),
        ("m2po", {"threshold": 0.0}),
        ("reverse_kl", {"cap": 0.0}),
        ("reverse_kl", {"rewards": -1.0}),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make_loss(name, options)


@pytest.mark.parametrize("distance", [30.0, -30.0])
@pytest.mark.parametrize("name", ["topr", "weighted_topr"])
def test_topr_bounds_every_token_with_a_negative_advantage(name: str, distance: float) -> None:
    """Also where the reward is positive, as graded rewards below their group's mean are."""
    inputs = random_inputs()
    graded = replace(
        inputs,
        logp_current=(inputs.logp_behavior + distance).detach().requires_grad_(),
        rewards=torch.full_like(inputs.rewards, 0.25),
        advantages=-torch.ones_like(inputs.advantages),
    )

    slopes = gradient(make_loss(name, {})(graded).per_token, graded)

    bound = 1.0 if distance > 0 else 1e-6  # the policy likes the sample much better, or has turned away from it
    assert slopes.abs().max() <= bound


def test_a_distilled_student_moves_towards_its_teacher_and_stays_there() -> None:
    """The exact gradient of KL(student || teacher) over three tokens, and the expectation of the sampled one."""
    teacher = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).log()
    logits = torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64, requires_grad=True)
    student = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)

    advantages = torch.zeros(3, dtype=torch.float64)
    inputs = replace(
        inputs_of(student, student.detach(), advantages, torch.arange(3)), columns={"teacher_logp": teacher}
    )
    result = make_loss("reverse_kl", {})(inputs)
    (found,) = torch.autograd.grad((result.per_token * student.detach().exp()).sum(), logits, retain_graph=True)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(result.metrics["reverse_kl"], student.detach() - teacher)

    there = replace(inputs, columns={"teacher_logp": student.detach()})
    assert not gradient(make_loss("reverse_kl", {})(there).per_token, there).any()
