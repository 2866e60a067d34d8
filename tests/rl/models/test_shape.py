"""What a model's `config.json` says that a learner holds of it is what the learner holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING

from rl.config.lora import LoraOptions
from rl.models.families import FAMILIES, mixtures, read_config
from rl.models.packing import sequence_pack
from rl.models.policy import Policy
from rl.models.protocol import ModelOptions
from rl.models.shape import ModelShape
from tests.rl.models.tiny_families import BASE, SHAPES, save_family

GIVEN = {"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 256}


def saved_bytes(work: Callable[[], Any], without: torch.nn.Module) -> int:
    """What autograd keeps for the backward of `work`, the parameters left out and nothing counted twice."""
    own = {parameter.untyped_storage().data_ptr() for parameter in without.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = work()  # is held, so that no address is given twice
    del result
    return sum(kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "within"), [("qwen3", 0.05), ("llama", 0.2), ("qwen2", 0.2), ("qwen3_moe", 0.05), ("mixtral", 0.2)]
)
def test_a_layer_keeps_what_it_is_said_to(family: str, within: float, dtype: torch.dtype, tmp_path: Path) -> None:
    """What one more layer's backward reads. A family that does not norm its queries keeps less, none keeps more."""
    tokens = 512
    changes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 1024}
    pack = sequence_pack(np.random.default_rng(0).integers(0, 256, tokens).tolist())
    kept = []
    for layers in (2, 3):
        policy = Policy.load(save_family(family, tmp_path / str(layers), num_hidden_layers=layers, **changes)).to(dtype)
        kept.append(saved_bytes(lambda policy=policy: policy(pack), policy))  # type: ignore[misc]

    told = BASE | SHAPES[family] | changes
    shape = ModelShape.of({key: value for key, value in told.items() if value is not None})
    of_a_layer = (kept[1] - kept[0]) / tokens
    assert of_a_layer == pytest.approx(shape.saved_bytes(dtype.itemsize), rel=within)
    assert of_a_layer <= 1.05 * shape.saved_bytes(dtype.itemsize)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "gemma3_text", "mistral", *mixtures()])
def test_parameters_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    policy = Policy.load(save_family(family, tmp_path))
    shape = ModelShape.of(read_config(tmp_path))
    assert shape.trained == pytest.approx(sum(each.numel() for each in policy.parameters()), rel=0.02)
    assert shape.served == pytest.approx(sum(each.tensor.numel() for each in policy.export()), rel=0.02)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", *sorted({*mixtures()} - {"glm4_moe"})])
def test_locked_pages_are_each_tensors_next_power_of_two(family: str, ranks: int, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 208, "num_attention_heads": 4, "head_dim": 48, "intermediate_size": 720}
    policy = Policy.load(save_family(family, tmp_path, **sizes))  # glm4_moe has layers of two kinds, told as their mean
    parts = [-(-each.numel() // ranks) for each in policy.parameters()]
    rounded = sum(2 ** math.ceil(math.log2(size)) for size in parts)
    assert ModelShape.of(read_config(tmp_path)).locked(ranks) == pytest.approx(rounded / sum(parts), rel=0.03)


def test_locked_pages_of_experts_behind_smaller_layers() -> None:
    """The mean of both kinds, as of GLM-4.5-Air, has fewer units than the experts; others have not less than none."""
    of_layer = GIVEN | {"first_k_dense_replace": 1, "num_hidden_layers": 4, "intermediate_size": 128}
    experts = {"n_routed_experts": 32, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64}
    assert ModelShape.of(of_layer | experts).locked(1) == 1, "each matrix is a power of two already"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_head_is_tied_as_its_family_has_it_where_a_file_does_not_say(family: str) -> None:
    """As in that of Gemma 3 1B, whose head would be 300 million parameters."""
    config = CONFIG_MAPPING[family]()
    told = {name: value for name, value in config.to_dict().items() if name != "tie_word_embeddings"}
    assert ModelShape.of(told).tied == config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_size": None}, "has no 'hidden_size'"),
        ({"num_hidden_layers": 0}, "has no 'num_hidden_layers'"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"intermediate_size": [1, 2]}, "intermediate_size="),
    ],
)
def test_a_config_that_does_not_say(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ModelShape.of(GIVEN | changes)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3", None),
        ("llama", ["q_proj", "v_proj", "lm_head"]),
        ("phi3", ["qkv_proj", "down_proj", "gate_up_proj"]),
        ("gemma3_text", None),
        ("qwen3_moe", None),
        ("qwen3_moe", ["q_proj", "experts"]),
        ("mixtral", ["experts"]),
    ],
)
def test_adapters_are_as_many_as_is_said(family: str, targets: list[str] | None, tmp_path: Path) -> None:
    options = LoraOptions(rank=8, targets=targets or "all-linear")
    policy = Policy.load(save_family(family, tmp_path), options=ModelOptions(lora=options))
    shape = ModelShape.of(read_config(tmp_path))
    assert shape.adapters(8, targets) == sum(each.numel() for _, each in policy.trainable())


@pytest.mark.parametrize("targets", [["q_proj"], "all-linear"])
def test_a_layer_with_adapters_keeps_no_more(targets: Any, tmp_path: Path) -> None:
    """But for the inner states of its adapters, which a rank of one in a hundred makes small."""
    tokens = 512
    changes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 1024}
    pack = sequence_pack(np.random.default_rng(0).integers(0, 256, tokens).tolist())
    options = ModelOptions(lora=LoraOptions(rank=2, targets=targets))
    kept = []
    for layers in (2, 3):
        folder = save_family("qwen3", tmp_path / str(layers), num_hidden_layers=layers, **changes)
        policy = Policy.load(folder, options=options)
        kept.append(saved_bytes(lambda policy=policy: policy(pack), policy))  # type: ignore[misc]

    shape = ModelShape.of(read_config(tmp_path / "2"))
    assert (kept[1] - kept[0]) / tokens <= 1.05 * shape.saved_bytes(4)
