"""The gradient of what several sequences read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl.models.packing import make_packs, sequence_pack
from rl.models.policy import Critic, PackedModel, Policy
from rl.models.protocol import ModelOptions
from rl.models.shared_rows import rows_of
from tests.rl.learner.tiny_policies import group_batch_part, save_tiny


class Adding(TorchDispatchMode):
    """The dtypes in which rows are added up."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_add" in str(func):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def grads(function: Callable[..., Tensor], values: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    leaf = values.detach().clone().requires_grad_()
    function(leaf, places).backward(weights)
    assert leaf.grad is not None
    return leaf.grad


def test_rows_and_gradients_are_those_of_a_plain_gather() -> None:
    values, weights = torch.randn(5, 2, 3), torch.randn(7, 2, 3)
    places = torch.tensor([4, 0, 0, 1, 4, 4, 2])
    assert torch.equal(rows_of(values, places), values[places])
    plain = grads(lambda v, p: v[p], values, places, weights)
    assert torch.allclose(grads(rows_of, values, places, weights), plain, rtol=0, atol=1e-6)
    assert grads(rows_of, values, places, weights)[3].abs().max() == 0

    double = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: rows_of(v, torch.tensor([0, 3, 3])), (double,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_they_are_added_up_in_float32_at_least(dtype: torch.dtype) -> None:
    values, places = torch.zeros(3, 8, dtype=dtype), torch.zeros(1000, dtype=torch.long)
    with Adding() as adding:
        found = grads(rows_of, values, places, torch.ones(1000, 8, dtype=dtype))
    assert adding.dtypes == [torch.promote_types(dtype, torch.float32)]
    assert found.dtype == dtype and found[0].tolist() == [1000.0] * 8 and not found[1:].any()


@pytest.mark.parametrize("kind", [Policy, Critic])
def test_a_model_adds_up_what_its_sequences_share_in_float32(kind: type[PackedModel], tmp_path: Path) -> None:
    """Keys and values of each layer, and the states that are read last."""
    model = kind.load(save_tiny(tmp_path), options=ModelOptions(torch.bfloat16))
    (pack,) = make_packs(group_batch_part([(40, [3, 5, 3, 1])]), 10_000, 5)
    output = model(pack)
    with Adding() as adding:
        (output if isinstance(output, Tensor) else output.logp).sum().backward()
    assert adding.dtypes == [torch.float32] * (2 * len(model.decoder.layers) + 1)


def test_equal_sequences_are_added_up_so_though_they_have_no_keys_in_common(tmp_path: Path) -> None:
    """As a group of short answers that are all the same: each is computed once, and read by all."""
    model = Policy.load(save_tiny(tmp_path), options=ModelOptions(torch.bfloat16))
    pack = sequence_pack(*[list(range(1, 12))] * 16)
    assert model.layout_of(pack).segments.keys is None
    output = model(pack)
    with Adding() as adding:
        output.logp.sum().backward()
    assert adding.dtypes == [torch.float32]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: this machine shows no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_adds_up_a_thousand_rows(compiled: bool) -> None:
    function = torch.compile(rows_of, dynamic=True) if compiled else rows_of
    ones = torch.ones(1000, 2, 64, device="cuda", dtype=torch.bfloat16)
    places = torch.zeros(1000, device="cuda", dtype=torch.long)
    found = grads(function, torch.zeros(3, 2, 64, device="cuda", dtype=torch.bfloat16), places, ones)
    assert found[0].unique().tolist() == [1000.0] and not found[1:].any()
