"""A tiny model with random weights of every family that can be trained, and of some that cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl.models.loading import saved_buffers

VOCABULARY = 256
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}

# What a family needs beside BASE, or instead of it; None leaves a setting out.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"head_dim": None, "num_attention_heads": 2},
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 32, "tie_word_embeddings": True},
    "phi3": {"head_dim": None, "num_attention_heads": 2, "sliding_window": None},
    "smollm3": {"head_dim": None, "num_attention_heads": 2, "no_rope_layers": [1, 0]},
    "olmo2": {"head_dim": None, "num_attention_heads": 2},
    "olmo3": {**WINDOWS, "head_dim": None, "num_attention_heads": 2},
    "granite": {"head_dim": None, "num_attention_heads": 2, "logits_scaling": 8.0, "attention_multiplier": 0.2},
    "glm4": {},
    "exaone4": {**WINDOWS, "sliding_window_pattern": "LG"},
    "ministral": WINDOWS,
    "starcoder2": {"head_dim": None, "num_attention_heads": 2, "sliding_window": None},
    "seed_oss": {},
    "arcee": {},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "qwen2_moe": {**EXPERTS, "head_dim": None, "num_attention_heads": 2, "shared_expert_intermediate_size": 64},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "olmoe": {"head_dim": None, "num_attention_heads": 2, "num_experts": 8, "num_experts_per_tok": 2},
    "granitemoe": {
        "head_dim": None,
        "num_attention_heads": 2,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mixtral": {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
}


def save_family(
    family: str,
    folder: Path,
    *,
    dropout: float = 0.0,
    seed: int = 0,
    dtype: str = "float32",
    max_file: str = "1GB",
    **changes: Any,
) -> Path:
    """Initial weights large enough that attention matters: a packing fault moves log-probabilities by tenths.

    dropout: every probability that the family's configuration has. `changes`: of its shape.
    """
    told = {name: value for name, value in (BASE | SHAPES[family] | changes).items() if value is not None}
    config: Any = AutoConfig.for_model(family, **told)
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, dropout)

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for each in [*model.parameters(), *(buffer for _, buffer in saved_buffers(model))]:
            if each.dim() == 1:  # norms and biases, which begin as ones and zeros
                each.data += 0.1 * torch.randn_like(each)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_file)
    return folder
