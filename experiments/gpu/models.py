"""Models of real sizes with random weights: no hub is needed to measure them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl.models.shape import ModelShape

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"head_dim": 32, "intermediate_size": 128, "vocab_size": 1024},
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
    | {"head_dim": 64, "intermediate_size": 4864, "vocab_size": 151936},
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
    | {"head_dim": 128, "intermediate_size": 8960, "vocab_size": 151936},
    "4b": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"head_dim": 128, "intermediate_size": 9728, "vocab_size": 151936},
    "mixture": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4}
    | {"head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936}
    | {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512},
    "tiny mixture": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"head_dim": 32, "intermediate_size": 128, "vocab_size": 1024}
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    | {"head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936},
}
"""As Qwen3 has them; `mixture` has 1.5B parameters, of which a token passes a third."""
_OWN_HEAD = ("8b",)
"""The head of all others is the embedding in the learner, and one of its own in the files of an engine."""


def shape_of(size: str) -> ModelShape:
    return ModelShape.of(SIZES[size] | {"tie_word_embeddings": size not in _OWN_HEAD})


def save_model(size: str, folder: Path, device: str, *, tied: bool | None = None) -> Path:
    """A random model in bfloat16, new unless it is there, made where that is fast; `tied` None: as the size has it."""
    if (folder / size).exists():
        return folder / size
    tied = size not in _OWN_HEAD if tied is None else tied
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family = "qwen3_moe" if shape_of(size).count else "qwen3"
    config = AutoConfig.for_model(family, **SIZES[size], tie_word_embeddings=tied, max_position_embeddings=32768)
    config.dtype = torch.bfloat16
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config).bfloat16()

    model.save_pretrained(folder / size)
    return folder / size
