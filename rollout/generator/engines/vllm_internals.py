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
from vllm.inputs.engine import TokensInput
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

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


def know_texts(llm: AsyncLLM, tokenizer: Path) -> None:
    """Requests with `SamplingParams.stop` end at these texts from now on; the engine was started without a tokenizer.

    tokenizer: `tokenizer.json` of the model, which is what turns are read with. Others pay nothing: only requests with
    `detokenize` are given it.
    """
    llm.output_processor.tokenizer = TokenizersBackend(tokenizer_file=str(tokenizer))  # type: ignore[assignment]


async def pause_at_once(llm: AsyncLLM) -> None:
    """As `pause_generation(mode="keep", clear_cache=True)` of a text model, without the 20 ms of sleep at its end.

    They are for callers who want to have seen all outputs by then. Whoever takes versions from the outputs need not.
    """
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)


class Stream:
    """One request inside vLLM: its outputs as they come, without what `AsyncLLM.generate` adds to each."""

    def __init__(self, llm: AsyncLLM, outputs: RequestOutputCollector) -> None:
        self._llm = llm
        self._outputs = outputs
        state = llm.output_processor.request_states.get(outputs.request_id)
        self.spans: list[tuple[str, int]] = state.weight_version_starts if state is not None else []
        """(weight version, its first token): vLLM's own list, which grows while the request runs; empty at first."""

    @classmethod
    async def begin(
        cls, llm: AsyncLLM, request_id: str, prompt: TokensInput, parameters: SamplingParams, priority: int
    ) -> Stream:
        """Raises VLLMClientError for a request that does not fit."""
        return cls(llm, await llm.add_request(request_id, prompt, parameters, priority=priority))

    async def next(self) -> tuple[CompletionOutput, bool]:
        """What was sampled since the last call, and whether it is the end."""
        output = self._outputs.get_nowait() or await self._outputs.get()
        assert isinstance(output, RequestOutput)
        return output.outputs[0], output.finished

    async def abort(self) -> None:
        """It ends with what it has."""
        await self._llm.abort(self._outputs.request_id, internal=True)

    def close(self) -> None:
        self._outputs.close()  # type: ignore[no-untyped-call]


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
