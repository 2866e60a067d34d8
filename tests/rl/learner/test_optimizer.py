"""Learning-rate schedule, clipping and AdamW against closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rl.config.schema import LearnerConfig
from rl.learner.trainer import Optimizer, learning_rate


def config(**values: Any) -> LearnerConfig:
    return LearnerConfig(**{"lr": 0.1, "max_grad_norm": 1e9} | values)


def test_warm_up_is_linear_and_moves_at_once() -> None:
    rates = [learning_rate(config(warmup_steps=4), step, 100) for step in range(6)]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_reaches_its_floor_at_the_last_batch(schedule: str) -> None:
    settings = config(warmup_steps=2, schedule=schedule, min_lr_fraction=0.2)
    rates = [learning_rate(settings, step, 13) for step in range(2, 13)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(0.02)
    assert rates[5] == pytest.approx(0.06)  # half way, for both shapes
    assert rates == sorted(rates, reverse=True)
    quarter = 0.5 * (1 + math.cos(math.pi * 0.2)) if schedule == "cosine" else 0.8
    assert rates[2] == pytest.approx(0.02 + 0.08 * quarter)


def test_a_resumed_schedule_continues_where_it_was() -> None:
    """The schedule depends on the absolute step and the last one only."""
    settings = config(schedule="linear", warmup_steps=1)
    uninterrupted = [learning_rate(settings, step, 6) for step in range(6)]
    first = range(3)
    resumed = range(3, 6)
    assert [learning_rate(settings, step, 6) for part in (first, resumed) for step in part] == uninterrupted


def test_a_run_that_ends_by_time_decays_with_its_time() -> None:
    """The share of the time counts, or that of the steps where they come to their end sooner."""
    settings = config(schedule="linear", warmup_steps=2)
    assert learning_rate(settings, 0, 1000, over=0.5) == pytest.approx(0.05)  # the warm-up has a length of its own
    assert [learning_rate(settings, 9, 1003, over) for over in (0.25, 0.9, 1.3)] == pytest.approx([0.075, 0.01, 0])
    assert learning_rate(settings, 502, 1003, over=0.25) == pytest.approx(0.05)


def test_gradient_is_clipped_by_its_global_norm() -> None:
    """The norm is reported before clipping; AdamW without momentum then moves by lr * sign(g) whatever the scale."""
    model = torch.nn.Linear(2, 1)
    optimizer = Optimizer(model.named_parameters(), config(max_grad_norm=1.0, betas=(0.0, 0.0), eps=1.0), 10)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.weight.grad = torch.tensor([[3.0, 0.0]])
    model.bias.grad = torch.tensor([4.0])
    norm, rate = optimizer.step(0)
    assert norm == pytest.approx(5.0)
    assert rate == 0.1
    moved = before["weight"] - model.weight
    assert moved[0, 0].item() == pytest.approx(0.1 * 0.6 / (0.6 + 1.0), rel=1e-4)  # g / (|g| + eps), g clipped to 3/5
    assert (before["bias"] - model.bias).item() == pytest.approx(0.1 * 0.8 / (0.8 + 1.0), rel=1e-4)
    assert model.weight.grad is None


def test_the_norm_of_a_large_gradient_is_what_it_is() -> None:
    """A CPU that adds up all of its squares one behind the other says 1.5 % too little."""
    layer = torch.nn.Linear(4096, 4096, bias=False)
    optimizer = Optimizer(layer.named_parameters(), config(), 10)
    layer.weight.grad = torch.full_like(layer.weight, 1.03)
    norm, _ = optimizer.step(0)
    assert norm == pytest.approx(1.03 * 4096, rel=1e-4)


def test_weight_decay_spares_norms_and_biases() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = Optimizer(model.named_parameters(), config(weight_decay=0.5), 10)
    weight = model.weight.detach().clone()
    bias = model.bias.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0)
    assert torch.allclose(model.weight, weight * (1 - 0.1 * 0.5))
    assert torch.equal(model.bias, bias)


def test_a_gradient_that_is_not_finite_stops_the_run_and_moves_nothing() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = Optimizer(model.named_parameters(), config(max_grad_norm=1.0), 10)
    before = model.weight.detach().clone()
    model.weight.grad = torch.tensor([[math.nan, 0.0]])
    with pytest.raises(FloatingPointError, match="step 7"):
        optimizer.step(7)
    assert torch.equal(model.weight, before)
