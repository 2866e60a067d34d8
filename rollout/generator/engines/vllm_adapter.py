"""An engine that is sent adapters alone: it has read the model from its files, and adds an adapter to what layers give.

vLLM knows an adapter by a number and a name, which stay the same while what they stand for changes. So every request
asks for the same one, and its tensors are put in the place of those before, in memory. What the prefix cache holds of
older ones is dropped or salted by the update, as that of merged weights is (`vllm.py`).

Of vLLM's own parts this uses what vLLM does not promise to keep; written for vllm 0.32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import torch
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from rl.config.lora import LoraOptions
from rl.models.loading import opened, weight_files

_ADAPTER = LoRARequest("policy", 1, "in memory")  # vLLM wants a path, and reads it where it does not know the number
_NO_TARGETS = {"embed_tokens", "lm_head"}


def adapter_of(arguments: AsyncEngineArgs) -> LoRARequest | None:
    """What every request asks for."""
    return _ADAPTER if arguments.enable_lora else None


def adapter_arguments(options: LoraOptions, model: str) -> dict[str, Any]:
    """vLLM's arguments for an adapter of these options beside the model in the folder `model`."""
    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= options.rank]
    targets = linear_layers(Path(model)) if isinstance(options.targets, str) else options.targets
    return {
        "enable_lora": True,
        "max_lora_rank": min(ranks),
        "max_loras": 1,
        "max_cpu_loras": 1,
        "lora_target_modules": sorted(targets),
    }


def linear_layers(folder: Path) -> set[str]:
    """All linear layers but the head, by the last part of their names, as the files have them."""
    found = set()
    files = weight_files(folder)
    for path in {*files.values()}:
        with opened(path) as file:
            names = [name for name in files if files[name] == path and name.endswith(".weight")]
            found |= {name.split(".")[-2] for name in names if len(file.get_slice(name).get_shape()) == 2}
    return found - _NO_TARGETS


def load_adapter(model_runner: Any, pairs: Iterable[tuple[str, torch.Tensor]], options: LoraOptions) -> None:
    """Put an adapter in the place of the one before. pairs: `LAYER.lora_A` and `LAYER.lora_B` of every layer.

    About a layer that it has not vLLM says nothing. Here that is an error, because the learner trains with it.
    """
    parts: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in pairs:
        layer, _, part = name.rpartition(".")
        parts[layer][part] = tensor.clone()  # vLLM multiplies what it is given by the scale, in place
    layers = {
        layer: LoRALayerWeights(layer, options.rank, 1, part["lora_A"], part["lora_B"], options.scale)
        for layer, part in parts.items()
    }

    manager = model_runner.lora_manager._adapter_manager
    adapter = LoRAModel(_ADAPTER.lora_int_id, options.rank, layers)
    manager.remove_adapter(adapter.id)
    manager.add_adapter(adapter)
    manager.activate_adapter(adapter.id)
    if missing := sorted(adapter.loras.keys() - manager.modules.keys()):
        raise RuntimeError(f"the engine has no adapter for {len(missing)} layers of the published one: {missing[:5]}")
