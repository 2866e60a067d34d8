"""Everything of vLLM that we use and that it does not promise to keep, in one place; written for vllm 0.32.

`tests/rollout/generator/test_vllm_engine.py` and `test_vllm_process.py` try each of these on the installed package, so
that another version fails there, with a name, and not in a run.
"""

from __future__ import annotations

import os
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from transformers import TokenizersBackend
from vllm import _custom_ops as vllm_custom_ops
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from rl.wire.cpu import FORKED_VARIABLE
from rollout.generator.engines.environment import UNPACKED_VARIABLE
from rollout.generator.engines.owner import die_with_owner

_PACKS: bool = vllm_custom_ops._supports_onednn
_NOTHING_PREPARED = {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}


def start_engine(arguments: AsyncEngineArgs) -> AsyncLLM:
    """As `AsyncLLM.from_engine_args`, but for one thing: on a CPU vLLM asks for an engine process that begins anew.

    It would import for seconds what is already here. A copy is as good where this process is one of a fork server: no
    thread of OpenMP has run in it. More threads, or workers below the engine, need the environment of a new process.
    """
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    if os.environ.get(FORKED_VARIABLE) and torch.get_num_threads() == 1 == config.parallel_config.world_size:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        os.register_at_fork(after_in_child=die_with_owner)
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


def engine_processes(llm: AsyncLLM) -> list[BaseProcess]:
    """The processes in which vLLM runs its engine core; with tensor parallelism the workers are their children."""
    client: Any = llm.engine_core
    processes: list[BaseProcess] = client.resources.engine_manager.processes
    return processes


def text_reader(tokenizer: Path) -> Any:
    """What vLLM's output processor reads texts with, from `tokenizer.json`."""
    return TokenizersBackend(tokenizer_file=str(tokenizer))


def heed_environment() -> None:
    """Before a model is built. UNPACKED_VARIABLE: let linear layers multiply with their weights as they are.

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


def forget_packed_experts(model: Any) -> None:
    """Before weights are loaded again on a CPU: let every layer of experts pack its weights anew.

    The CPU kernel keeps a packed copy of the experts, made when the kernel is; a reload writes the parameters and
    leaves the copy as it was, so the layer goes on with the old experts. A layer without a kernel makes one, and packs.
    On GPUs the kernel reads the parameters themselves, whose addresses CUDA graphs hold: it must stay.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None
