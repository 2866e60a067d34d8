"""Diagnostics: values by hand, and the same values however the tokens were cut."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from algos.conformance import inputs_of, part, random_inputs
from algos.registry import make_loss
from algos.types import LossInputs, LossResult
from rl.learner.diagnostics import Diagnostics


def diagnostics(*packs: LossInputs) -> Diagnostics:
    loss = make_loss("ppo", {})
    total = Diagnostics()
    for pack in packs:
        total.update(pack, loss(pack), pack.mask.nonzero()[:, 0])
    return total


def test_values() -> None:
    ratios = [0.5, 1.0, 2.0, 4.0]
    behavior = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=torch.float64)
    current = behavior + torch.tensor(ratios, dtype=torch.float64).log()
    inputs = inputs_of(current, behavior, torch.tensor([1.0, 1.0, -1.0, 9.0]).double(), torch.tensor([0, 0, 1, 2]))
    mask = torch.tensor([True, True, True, False])
    inputs = replace(
        inputs, mask=mask, staleness=torch.tensor([0, 1, 2, 0]), entropy=torch.tensor([1.0, 2.0, 3.0, 9.0])
    )
    total = Diagnostics()
    result = LossResult(torch.tensor([3.0, 4.0, 5.0, 9.0]), {"weight": torch.tensor([1.0, 0.0, 0.0, 9.0])})
    total.update(inputs, result, torch.tensor([0, 1, 2]))
    metrics = {name: value for name, value in total.metrics().items() if "ratio_p" not in name and "stale_" not in name}

    assert metrics == pytest.approx(
        {
            "loss/objective": 4.0,
            "loss/ratio_mean": 3.5 / 3,
            "loss/ratio_max": 2.0,
            "loss/ess": 3.5**2 / (3 * 5.25),
            "loss/kl_behavior": 0.5 / 3,  # sum of r - 1 - log r; the logarithms cancel
            "loss/kl_behavior_k1": 0.0,
            "loss/kl_proximal": (3.5 * math.exp(-0.05) - 3 + 3 * 0.05) / 3,
            "loss/kl_proximal_k1": (3 * 0.05) / 3,
            "loss/entropy": 2.0,
            "loss/surprise": 0.0,
            "loss/advantage_abs": 1.0,
            "loss/token_staleness": 1.0,
            "loss/token_staleness_max": 2.0,
            "loss/weight": 1 / 3,
        }
    )


@pytest.mark.parametrize("rare", [0.3, 0.02, 1e-4, 1e-9])
def test_the_least_variance_of_a_surprise(rare: float) -> None:
    """It is the variance where two tokens are possible, whichever was drawn, and below it where more are."""
    for chances in ([1 - rare, rare], [1 - rare, rare / 4, 3 * rare / 4], [0.25, 0.25, 0.25, 0.25]):
        p = torch.tensor(chances, dtype=torch.float64)
        entropy = -(p * p.log()).sum()
        variance = float((p * (-p.log() - entropy) ** 2).sum())
        for drawn in p:
            inputs = inputs_of(drawn.log()[None], drawn.log()[None], torch.ones(1).double(), torch.zeros(1).long())
            least = float(diagnostics(replace(inputs, entropy=entropy[None])).sums["surprise_variance"].sum())
            assert 0 <= least <= variance * (1 + 1e-6) + 1e-12
            assert len(chances) > 2 or least == pytest.approx(variance, rel=1e-3, abs=1e-12)


def test_cuts_and_order_do_not_matter() -> None:
    inputs = random_inputs()
    whole = diagnostics(inputs).metrics()
    pieces = [part(inputs, samples) for samples in ([0, 3], [1], [2, 4, 5])]
    assert diagnostics(*pieces).metrics() == pytest.approx(whole, rel=1e-12)
    joined = diagnostics(pieces[2])
    joined.add(diagnostics(pieces[1], pieces[0]))
    assert joined.metrics() == pytest.approx(whole, rel=1e-12)
    assert diagnostics(pieces[0]).metrics() != pytest.approx(whole, rel=1e-3)


def test_ratio_quantiles_within_the_width_of_a_bin() -> None:
    log_ratio = torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.3
    behavior = torch.full_like(log_ratio, -2.0)
    inputs = inputs_of(
        behavior + log_ratio, behavior, torch.ones_like(behavior), torch.zeros(20_000, dtype=torch.int64)
    )
    metrics = diagnostics(inputs).metrics()
    for quantile in (0.01, 0.05, 0.5, 0.95, 0.99):
        exact = float(log_ratio.quantile(quantile))
        assert math.log(metrics[f"loss/ratio_p{round(100 * quantile):02d}"]) == pytest.approx(exact, rel=0.07, abs=2e-3)


def test_clip_fractions_by_sign_of_the_advantage() -> None:
    ratios = torch.tensor([2.0, 1.0, 0.5, 2.0, 0.1], dtype=torch.float64)
    behavior = torch.full_like(ratios, -3.0)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]).double()
    metrics = diagnostics(
        inputs_of(behavior + ratios.log(), behavior, advantages, torch.tensor([0, 0, 1, 1, 1]))
    ).metrics()
    assert metrics["loss/clip_fraction_positive"] == 1 / 2
    assert metrics["loss/clip_fraction_negative"] == pytest.approx(2 / 3)
    assert metrics["loss/clip_fraction"] == pytest.approx(3 / 5)


def test_by_staleness() -> None:
    ratios = torch.tensor([2.0, 4.0, 1.0, 3.0], dtype=torch.float64)
    behavior = torch.full_like(ratios, -3.0)
    inputs = inputs_of(behavior + ratios.log(), behavior, torch.ones(4).double(), torch.zeros(4, dtype=torch.int64))
    metrics = diagnostics(replace(inputs, staleness=torch.tensor([0, 0, 4, 90]))).metrics()
    assert metrics["stale_0/tokens"] == 2 and metrics["stale_0/ratio_mean"] == pytest.approx(3)
    assert metrics["stale_0/ess"] == pytest.approx(36 / (2 * 20)) and metrics["stale_0/clip_fraction"] == 1
    assert metrics["stale_3_4/clip_fraction"] == 0 and metrics["stale_9_up/ratio_mean"] == pytest.approx(3)
    assert not any(name.startswith(("stale_1", "stale_2", "stale_5")) for name in metrics)


def test_a_bucket_has_all_that_the_whole_has() -> None:
    """Two buckets of the same tokens say the same as the whole, and each its own where they differ."""
    inputs = random_inputs()
    inputs = replace(inputs, staleness=torch.zeros_like(inputs.staleness))
    old = replace(inputs, staleness=torch.where(inputs.mask, 4, 0))
    metrics = diagnostics(inputs, old).metrics()
    for name in ("ratio_p95", "kl_behavior", "kl_proximal", "entropy", "ess", "clip_fraction_positive"):
        assert metrics[f"stale_0/{name}"] == metrics[f"stale_3_4/{name}"] == pytest.approx(metrics[f"loss/{name}"])
    raised = replace(old, logp_behavior=old.logp_behavior - 1.0, entropy=old.entropy + 1.0)
    metrics = diagnostics(inputs, raised).metrics()
    assert metrics["stale_3_4/entropy"] == pytest.approx(metrics["stale_0/entropy"] + 1)
    assert metrics["stale_3_4/ratio_p50"] > 2 * metrics["stale_0/ratio_p50"]


def test_nothing_generated_adds_nothing() -> None:
    inputs = random_inputs()
    empty = replace(inputs, mask=torch.zeros_like(inputs.mask))
    assert diagnostics(inputs, empty).metrics() == diagnostics(inputs).metrics()
    assert diagnostics(empty).metrics() == {} == Diagnostics().metrics()


def test_one_absurd_token_leaves_numbers() -> None:
    inputs = random_inputs()
    inputs.logp_behavior[inputs.mask.nonzero()[0]] = -1e4
    assert all(math.isfinite(value) for value in diagnostics(inputs).metrics().values())


def test_no_gradient_is_kept() -> None:
    total = diagnostics(random_inputs())
    assert not any(value.requires_grad for value in (*total.sums.values(), *total.maxima.values()))
