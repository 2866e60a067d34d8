"""Two ranks, as real processes over gloo, give the gradient, statistics and step of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from rl.models.packing import pad_packs
from rl.models.policy import Policy
from rl.models.protocol import ModelOptions
from tests.rl.learner.ranks import process_group, results_of_ranks
from tests.rl.learner.tiny_policies import backward, largest_difference, make_batch_parts, packs_of, save_tiny
from tests.rl.models.tiny_families import save_family

RANKS = 2
VARIANTS = {  # name -> (max tokens per pack of each rank, activation checkpointing)
    "even": ((64, 64), False),
    "uneven": ((64, 16), False),  # the second rank has more packs
    "checkpointed": ((16, 64), True),
}


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    batch_part = make_batch_parts(RANKS)[rank]
    results: dict[str, Any] = {}
    with process_group(folder, rank, RANKS) as mesh:
        for name, (bounds, checkpointing) in VARIANTS.items():
            policy = Policy.load(folder, mesh, options=ModelOptions(activation_checkpointing=checkpointing))
            packs = packs_of(batch_part, bounds[rank])
            counts = torch.tensor([len(packs)])
            dist.all_reduce(counts, dist.ReduceOp.MAX)

            grads, stats = backward(policy, pad_packs(packs, int(counts)), batch_part.loss_tokens, world_size=RANKS)
            stats.all_reduce()
            results[name] = {"packs": len(packs), "grads": grads, "metrics": stats.metrics()}

        results["rows"] = [(name, rows.clone(), placement.row) for name, rows, placement in policy.export()]
        torch.save(results, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module", params=["dense", "experts", "buffers"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    if request.param == "dense":
        return save_tiny(folder)
    if request.param == "buffers":  # which are not sharded, so one rank alone tells them
        return save_family("glm4_moe", folder, tie_word_embeddings=True)
    return save_family("qwen3_moe", folder, tie_word_embeddings=True, num_experts=5)  # three and two


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return results_of_ranks(rank_main, folder, RANKS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_equal_one(folder: Path, ranks: list[dict[str, Any]], variant: str) -> None:
    (whole,) = make_batch_parts(1)
    expected, stats = backward(Policy.load(folder), packs_of(whole), whole.loss_tokens)
    found = [rank[variant] for rank in ranks]
    if variant != "even":
        assert found[0]["packs"] != found[1]["packs"]
    for rank in found:
        assert largest_difference(rank["grads"], expected) < 1e-6
        assert rank["metrics"] == pytest.approx(stats.metrics(), rel=1e-5)
    assert found[0]["metrics"] == found[1]["metrics"]


def test_exports_of_all_ranks_are_the_checkpoint(folder: Path, ranks: list[dict[str, Any]]) -> None:
    saved = load_file(folder / "model.safetensors")
    saved["lm_head.weight"] = saved["model.embed_tokens.weight"]
    pieces: dict[str, list[Tensor]] = {}
    for rank in ranks:
        for name, rows, first in rank["rows"]:
            have = pieces.setdefault(name, [])
            assert first == sum(len(piece) for piece in have)
            have.append(rows)
    assert pieces.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(torch.cat(pieces[name]), tensor)
