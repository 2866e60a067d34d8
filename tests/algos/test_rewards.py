"""Reward shaping against its formulas, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from algos.registry import NoOptions
from algos.rewards import RewardInputs, make_shaping, shape

INPUTS = RewardInputs(
    rewards=torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64),
    group=torch.tensor([0, 0, 0, 1, 1]),
    tokens=torch.tensor([10, 80, 85, 100, 120]),
    turns=torch.ones(5, dtype=torch.int64),
    truncated=torch.tensor([False, False, False, False, True]),
    max_tokens=100,
)


def test_overlong_is_dapos_soft_punishment() -> None:
    """Eq. 13 with L_max = 100 and L_cache = 20: 0 up to 80 tokens, then linear, -1 from 100 on."""
    found = make_shaping("overlong", {})(INPUTS)
    assert found.tolist() == pytest.approx([1.0, 1.0, -0.25, 0.0, -1.0])
    stronger = make_shaping("overlong", {"max_tokens": 90, "buffer": 10, "penalty": 2})(INPUTS)
    assert stronger.tolist() == pytest.approx([1.0, 1.0, -1.0, -1.0, -2.0])


def test_affine_and_truncation() -> None:
    assert make_shaping("affine", {"scale": 2, "shift": -1})(INPUTS).tolist() == [1, 1, -1, 1, -1]
    assert make_shaping("affine", {"scale": 2, "low": 0.5, "high": 1.5})(INPUTS).tolist() == [1.5, 1.5, 0.5, 1.5, 0.5]
    assert make_shaping("truncation", {"scale": 0, "shift": -1})(INPUTS).tolist() == [1, 1, 0, 1, -1]


def shortest_first(inputs: RewardInputs, options: NoOptions) -> Tensor:
    return inputs.rewards - inputs.tokens / 100


def broken(inputs: RewardInputs, options: NoOptions) -> Tensor:
    return inputs.rewards[1:]


def test_each_sees_what_the_one_before_returned() -> None:
    found = shape(INPUTS, [make_shaping("affine", {"scale": 10}), make_shaping(shortest_first, {})])
    assert found.tolist() == pytest.approx([9.9, 9.2, -0.85, 9.0, -1.2])
    assert shape(INPUTS, []) is INPUTS.rewards


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"unknown shaping 'overlon'; did you mean 'overlong'\?"):
        make_shaping("overlon", {})
    with pytest.raises(ValueError, match=r"shaping 'overlong' has no option 'bufer'; did you mean 'buffer'\?"):
        make_shaping("overlong", {"bufer": 3})
    with pytest.raises(ValueError, match="buffer=30 must be at most max_tokens=20"):
        make_shaping("overlong", {"max_tokens": 20, "buffer": 30})
    with pytest.raises(ValueError, match=r"low=1\.0 is above high=0\.0"):
        make_shaping("affine", {"low": 1.0, "high": 0.0})
    with pytest.raises(ValueError, match=r"broken' must answer \(5,\) finite rewards, answered \(4,\)"):
        make_shaping(broken, {})(INPUTS)
