"""A rank that is alone, in half precision: what FSDP's mixed precision computes, to the last bit, in every family."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl.config.lora import LoraOptions
from rl.models.families import FAMILIES
from rl.models.packing import Pack, sequence_pack
from rl.models.policy import Policy
from rl.models.protocol import ModelOptions, local
from tests.rl.learner.ranks import process_group
from tests.rl.models.tiny_families import VOCABULARY, save_family

LENGTHS = (40, 23, 40, 57)
OPTIONS = {
    "plain": ModelOptions(torch.bfloat16),
    "computed again": ModelOptions(torch.bfloat16, activation_checkpointing=True),
    "adapters": ModelOptions(torch.bfloat16, activation_checkpointing=True, lora=LoraOptions(rank=2, alpha=4)),
}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    torch.set_num_threads(1)
    with process_group(tmp_path_factory.mktemp("ranks")) as made:
        yield made


def pack_of(seed: int) -> Pack:
    random = torch.Generator().manual_seed(seed)
    return sequence_pack(*(torch.randint(3, VOCABULARY, (length,), generator=random).tolist() for length in LENGTHS))


def computed(policy: Policy) -> dict[str, Tensor]:
    """Of two packs: log-probabilities, and the gradients that both leave."""
    found: dict[str, Tensor] = {}
    for seed in range(2):
        logp, entropy, _ = policy(pack_of(seed), entropy_gradient=True)
        (logp.sum() + entropy.sum()).backward()
        found |= {f"logp {seed}": logp.detach(), f"entropy {seed}": entropy.detach()}
    return found | {name: local(each.grad) for name, each in policy.trainable() if each.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_as_under_fsdp(family: str, mesh: Any, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    alone, sharded = (computed(Policy.load(folder, each, options=OPTIONS["plain"])) for each in (None, mesh))
    assert alone.keys() == sharded.keys() and len(alone) > 4
    assert [name for name, each in alone.items() if not torch.equal(each, sharded[name])] == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_layers_that_are_computed_again_and_adapters(options: str, tied: bool, mesh: Any, tmp_path: Path) -> None:
    folder = save_family("qwen3", tmp_path, tie_word_embeddings=tied)
    alone, sharded = (computed(Policy.load(folder, each, options=OPTIONS[options])) for each in (None, mesh))
    assert all(torch.equal(each, sharded[name]) for name, each in alone.items())
    assert all(each.dtype == torch.float32 for each in alone.values())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_a_forward_that_failed_the_weights_are_what_they_were(error: type[BaseException], tmp_path: Path) -> None:
    policy = Policy.load(save_family("qwen3", tmp_path), options=OPTIONS["computed again"])
    before = dict(policy.named_parameters())
    expected = computed(policy)
    policy.zero_grad()

    def stop(*_: object) -> None:
        raise error

    hook = policy.decoder.layers[1].mlp.register_forward_pre_hook(stop)
    with pytest.raises(error):
        policy(pack_of(0))
    hook.remove()

    assert all(torch.equal(each, expected[name]) for name, each in computed(policy).items())
    assert all(each is before[name] and isinstance(each, nn.Parameter) for name, each in policy.named_parameters())
