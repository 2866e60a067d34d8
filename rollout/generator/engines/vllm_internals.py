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
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM

from rl.core.process import FORKED_VARIABLE
from rollout.generator.engines.owner import die_with_owner


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
