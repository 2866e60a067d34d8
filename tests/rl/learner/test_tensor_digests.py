"""A digest of each tensor: the same for any number of ranks, another one for any flipped bit or exchanged entry."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import rl.learner.tensor_digests as tensor_digests_module
from rl.learner.tensor_digests import tensor_digests
from rl.models.policy import Policy
from tests.rl.learner.ranks import process_group, results_of_ranks
from tests.rl.learner.tiny_policies import save_tiny


def _digest(tensor: Tensor) -> str:
    return tensor_digests([("it", tensor)])["it"]


def _on_rank(rank: int, folder: str) -> None:
    with process_group(folder, rank, 2) as mesh:
        torch.save(tensor_digests(Policy.load(f"{folder}/model", mesh).trainable()), f"{folder}/rank{rank}.pt")


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    """The vocabulary is odd, so the ranks hold unequal numbers of rows."""
    save_tiny(tmp_path / "model")
    alone = tensor_digests(Policy.load(tmp_path / "model").trainable())
    assert len(set(alone.values())) > len(alone) / 2  # norms begin alike
    assert results_of_ranks(_on_rank, tmp_path, 2) == [alone, alone]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_bit_of_every_entry_counts(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    kind = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    seen = {_digest(tensor)}
    for place in range(tensor.numel()):
        for bit in range(8 * tensor.element_size()):
            flipped = tensor.clone()
            flipped.view(kind).view(-1)[place] ^= torch.tensor(1, dtype=kind) << bit
            seen.add(_digest(flipped))
    assert len(seen) == 1 + tensor.numel() * 8 * tensor.element_size()


def test_order_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(12.0).reshape(4, 3)
    others = [tensor[[1, 0, 2, 3]], tensor[:, [0, 2, 1]], tensor.reshape(3, 4).T, tensor.reshape(2, 6)]
    assert len({_digest(each) for each in (tensor, *others)}) == 5

    whole = _digest(tensor)
    monkeypatch.setattr(tensor_digests_module, "_CHUNK", (5, 5))
    assert _digest(tensor) == whole


def test_vectors_scalars_and_nothing() -> None:
    assert (
        len({_digest(torch.ones(3)), _digest(torch.ones(4)), _digest(torch.tensor(1.0)), _digest(torch.ones(0))}) == 4
    )
