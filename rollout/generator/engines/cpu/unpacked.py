"""Linear layers on a CPU that keep their weights as they are loaded, and experts that pack them anew.

Of vLLM's own parts this uses what vLLM does not promise to keep; written for vllm 0.32.
"""

from __future__ import annotations

import os
from typing import Any

from vllm import _custom_ops as vllm_custom_ops

from rollout.generator.engines.cpu.environment import UNPACKED_VARIABLE

_PACKS: bool = vllm_custom_ops._supports_onednn


def heed_environment() -> None:
    """To be called before a model is built. If UNPACKED_VARIABLE is set, let linear layers multiply with their weights
    as they are.

    On a CPU vLLM packs them for oneDNN and takes their parameters away: every load has to give them back, fill them and
    pack them again. Without that a load writes into the parameters. It is for float32, where torch's own product was
    as quick for a tiny model and for one 1 024 wide; in bfloat16 nobody has tried.
    """
    vllm_custom_ops._supports_onednn = _PACKS and not os.environ.get(UNPACKED_VARIABLE)


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
