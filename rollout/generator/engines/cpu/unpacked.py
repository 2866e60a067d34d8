"""Where a load may write into a model's parameters: linear layers on a CPU that keep their weights as they are loaded.

Of vLLM's own parts this uses what vLLM does not promise to keep; written for vllm 0.32.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from vllm import _custom_ops as vllm_custom_ops
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from rollout.generator.engines.cpu.environment import UNPACKED_VARIABLE

_PACKS: bool = vllm_custom_ops._supports_onednn
_NOTHING_PREPARED = {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}


def heed_environment() -> None:
    """To be called before a model is built. If UNPACKED_VARIABLE is set, let linear layers multiply with their weights
    as they are.

    On a CPU vLLM packs them for oneDNN and takes their parameters away: every load has to give them back, fill them and
    pack them again. Without that a load writes into the parameters. It is for float32, where torch's own product was
    as quick for a tiny model and for one 1 024 wide; in bfloat16 nobody has tried.
    """
    vllm_custom_ops._supports_onednn = _PACKS and not os.environ.get(UNPACKED_VARIABLE)


def are_weights_as_loaded(model_runner: Any) -> bool:
    """Whether the parameters are all that the layers compute with, so that a load may write into them.

    So it is for linear layers that pack nothing, embeddings, norms and plain attention. Whatever else prepares its
    weights after a load, such as experts, latent attention and quantized layers, has to be told of each.
    """
    if model_runner.device.type != "cpu" or vllm_custom_ops._supports_onednn or model_runner.lora_config is not None:
        return False

    for module in model_runner.get_model().modules():
        method = getattr(module, "quant_method", None)
        if type(method) not in _NOTHING_PREPARED:
            return False
        if hasattr(module, "process_weights_after_loading") and type(module) is not Attention:
            return False
        if not all(each.numel() and each.dtype == torch.float32 for each in module.parameters(recurse=False)):
            return False
    return True


def write_into_parameters(model_runner: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """A load where `are_weights_as_loaded`; the names of what was loaded."""
    with torch.no_grad():
        loaded: set[str] = model_runner.get_model().load_weights(pairs)
    model_runner.reset_encoder_cache()
    model_runner.reset_mm_cache()
    return loaded


def forget_packed_experts(model: Any) -> None:
    """To be called before weights are loaded again on a CPU: let every layer of experts pack its weights anew.

    The CPU kernel keeps a packed copy of the experts, made when the kernel is. A reload writes the parameters and
    leaves the copy as it was, so the layer goes on with the old experts. A layer without a kernel makes one, and packs.
    On GPUs the kernel reads the parameters themselves, whose addresses CUDA graphs hold: it must stay.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
