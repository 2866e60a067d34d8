"""Where a load may write into a model's parameters, and how it does.

vLLM's own reload restores each layer, fills it and prepares it once more. That is 60 ms of Python for 28 layers, in
which nothing is generated, and one more copy of all bytes. Layers that compute with their parameters as they were
loaded need none of it. Of vLLM's own parts this uses what vLLM does not promise to keep; written for vllm 0.32.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as vllm_custom_ops
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

_NOTHING_PREPARED = {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}


def are_weights_as_loaded(model_runner: Any) -> bool:
    """Whether the parameters are all that the layers compute with, so that a load may write into them.

    So it is for linear layers that pack nothing, embeddings, norms and plain attention. Whatever else prepares its
    weights after a load, such as experts, latent attention and quantized layers, has to be told of each. Only a CPU's
    linear layers pack: in any other dtype than float32 some may, and keep the parameter all the same.
    """
    on_cpu = model_runner.device.type == "cpu"
    if model_runner.lora_config is not None or (on_cpu and vllm_custom_ops._supports_onednn):
        return False

    model: nn.Module = model_runner.get_model()
    for module in model.modules():
        prepares = hasattr(module, "process_weights_after_loading") and type(module) is not Attention
        if prepares or type(getattr(module, "quant_method", None)) not in _NOTHING_PREPARED:
            return False

    parameters = list(model.parameters())
    return all(each.numel() for each in parameters) and not (
        on_cpu and any(each.dtype != torch.float32 for each in parameters)
    )


def write_into_parameters(model_runner: Any, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """A load where `are_weights_as_loaded`; the names of what was loaded."""
    with torch.no_grad():
        loaded: set[str] = model_runner.get_model().load_weights(pairs)
    model_runner.reset_encoder_cache()
    model_runner.reset_mm_cache()
    return loaded
