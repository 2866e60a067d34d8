"""Group advantages against numpy, and groups that carry no signal."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from algos.registry import advantage_names, get_advantage

REWARDS = torch.tensor([1.0, 0.0, 3.0, 0.1, 7.0, 0.1, 2.0, 0.1])
GROUP = torch.tensor([70, 5, 70, 9, 5, 9, 70, 9])  # ids are arbitrary, members stand apart


@pytest.mark.parametrize("normalised", [True, False])
def test_values(normalised: bool) -> None:
    found = get_advantage("group" if normalised else "group_mean")(REWARDS, GROUP)
    for group in GROUP.unique():
        rewards = REWARDS[group == GROUP].double().numpy()
        expected = rewards - rewards.mean()
        if normalised:
            expected = expected / (rewards.std() + 1e-6)
        np.testing.assert_allclose(found[group == GROUP].numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", advantage_names())
def test_groups_without_signal_give_exactly_zero(name: str) -> None:
    rewards = torch.tensor([0.1] * 7 + [5.0] + [1e6] * 3)
    found = get_advantage(name)(rewards, torch.tensor([1] * 7 + [2] + [3] * 3))
    assert found.dtype == torch.float32 and found.shape == (11,)
    assert not found.any()


@pytest.mark.parametrize("name", advantage_names())
def test_finite_and_the_same_in_any_order(name: str) -> None:
    estimator = get_advantage(name)
    order = torch.randperm(len(REWARDS), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(estimator(REWARDS[order], GROUP[order]), estimator(REWARDS, GROUP)[order])
    almost = torch.tensor([1.0, 1.0 + 1e-7, 1e30, -1e30])
    assert torch.isfinite(estimator(almost, torch.tensor([0, 0, 1, 1]))).all()
    assert estimator(REWARDS[:0], GROUP[:0]).shape == (0,)
