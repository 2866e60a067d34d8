"""Losses that are another one under their own options."""

from __future__ import annotations

import pytest
import torch

from algos.registry import get_loss, make_loss
from algos.types import LossInputs


@pytest.mark.parametrize(("alias", "name"), [("ppo", "grpo"), ("weighted_topr", "topr")])
def test_aliases_are_the_same_loss(alias: str, name: str) -> None:
    torch.manual_seed(0)
    current, behavior, advantages = torch.randn(3, 12)

    inputs = LossInputs(
        logp_current=current,
        logp_behavior=behavior,
        logp_proximal=None,
        entropy=torch.zeros(12),
        advantages=advantages,
        mask=torch.arange(12) % 4 > 0,
        sample=torch.arange(12) // 4,
        n_samples=3,
        staleness=torch.zeros(12, dtype=torch.int64),
        rewards=torch.tensor([1.0, 0.0, 1.0]),
    )

    one, other = get_loss(alias), get_loss(name)
    assert (one.advantage, one.aggregation) == (other.advantage, other.aggregation)
    assert torch.equal(make_loss(alias, {})(inputs).per_token, make_loss(name, {})(inputs).per_token)
