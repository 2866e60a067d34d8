"""Adapters in peft's files, which peft and vLLM read: its names, and its way to keep those of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rl.config.lora import LoraOptions
from rl.models.lora import EXPERTS, LoraExperts, LoraLinear, Pair, adapted
from rl.models.protocol import whole

_WRAPPED_FIRST = "gate_up_proj"  # of the experts' parameters


@torch.no_grad()
def adapter(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All adapters whole, by the names that peft gives them. All ranks go through it together."""
    for name, layer in adapted(model).items():
        for pair in layer.pairs:
            a, b = _in_files(name, pair)
            yield a, whole(getattr(layer, pair.a)).flatten(0, -2)
            yield b, _columns(whole(getattr(layer, pair.b)))


def peft_config(model: nn.Module, options: LoraOptions, base: str) -> dict[str, Any]:
    """What peft and vLLM ask of `adapter_config.json`; base: folder or name of the model that they belong to."""
    found = adapted(model).items()
    experts = {
        f"{EXPERTS}.{pair.weight}" for _, layer in found if isinstance(layer, LoraExperts) for pair in layer.pairs
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": int(options.alpha) if options.alpha.is_integer() else options.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name, layer in found if isinstance(layer, LoraLinear)}),
        **({"target_parameters": sorted(experts, reverse=True)} if experts else {}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _in_files(layer: str, pair: Pair) -> tuple[str, str]:
    """The names of both matrices. Of a layer with two parameters peft wraps the one that it was told first again."""
    owner = f"base_model.model.{layer}" + (".base_layer" if pair.weight == _WRAPPED_FIRST else "")
    return f"{owner}.lora_A.weight", f"{owner}.lora_B.weight"


def _columns(b: Tensor) -> Tensor:
    """B as files have it: of experts (out, rank x experts), one after another within each rank."""
    return b.permute(1, 2, 0).flatten(1) if b.dim() == 3 else b
