"""Aggregations against their formulas, and the same sum however the samples are spread."""

from __future__ import annotations

import pytest
import torch

from algos.aggregation import Aggregation, sample_weights

TOKENS = torch.tensor([3, 5, 0, 2])  # the third sample does not count
LOSSES = [torch.rand(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in TOKENS.tolist()]


def aggregated(kind: Aggregation, constant: int = 0) -> float:
    weights = sample_weights(kind, TOKENS, constant)
    return float(sum(w * losses.sum() for w, losses in zip(weights, LOSSES, strict=True)) / TOKENS.sum())


def test_values() -> None:
    counted = [losses for losses in LOSSES if len(losses)]
    assert aggregated("token") == pytest.approx(float(torch.cat(counted).mean()), rel=1e-12)
    means = torch.stack([losses.mean() for losses in counted])
    assert aggregated("sequence") == pytest.approx(float(means.mean()), rel=1e-12)
    sums = torch.stack([losses.sum() for losses in counted])
    assert aggregated("constant", 16) == pytest.approx(float(sums.mean() / 16), rel=1e-12)


def test_equal_lengths_make_token_and_sequence_mean_equal() -> None:
    torch.testing.assert_close(sample_weights("sequence", torch.tensor([4, 4, 4])), torch.ones(3, dtype=torch.float64))
    same = sample_weights("constant", torch.tensor([4, 4, 4]), 4)
    torch.testing.assert_close(same, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["token", "sequence", "constant"])
def test_nothing_to_aggregate(kind: Aggregation) -> None:
    assert torch.isfinite(sample_weights(kind, torch.tensor([0, 0]), 4)).all()
