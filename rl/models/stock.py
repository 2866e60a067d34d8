"""Models of transformers as they are, for what trains or samples without a policy: the warm start of tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl.models.layout import whole_sequences
from rl.models.packed_attention import NAME, check_layers


def load_stock(folder: str | Path, *, packed: bool) -> Any:
    """The stock model, in float32 on the CPU. `packed`: its attention reads one row of sequences, instead of rows with
    padding."""
    options = {"attn_implementation": NAME} if packed else {}
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, **options)
    if packed:
        check_layers(model.config)
    return model


def states(model: Any, token_ids: Tensor, position_ids: Tensor) -> Tensor:
    """(rows, width, H) after each token; token_ids, position_ids (rows, width) restart at 0 with each sequence."""
    options: dict[str, Any] = {}
    if model.config._attn_implementation == NAME:
        options["segments"] = whole_sequences(position_ids[0].numpy())
    inputs = {"input_ids": token_ids, "position_ids": position_ids, "use_cache": False}
    hidden: Tensor = model.base_model(**inputs, **options).last_hidden_state
    return hidden


def logits(model: Any, hidden: Tensor) -> Tensor:
    """(..., vocabulary) of states (..., H)."""
    found: Tensor = model.get_output_embeddings()(hidden)
    return found
