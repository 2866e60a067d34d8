"""What vLLM is told: the arguments of an engine and of a request, and how it reports its capacity and its death."""

from __future__ import annotations

import signal
from multiprocessing.process import BaseProcess
from pathlib import Path

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, SamplingParams

from rl.config.failures import EngineDied
from rl.config.lora import served_adapter
from rl.wire.columns import COLUMNS, ROUTED_EXPERTS
from rl.wire.messages import Generate
from rl.wire.run import ProcessContext, RunFile
from rollout.generator.engines import engine_options
from rollout.generator.engines.base import EngineInfo
from rollout.generator.engines.environment import device_memory, kv_block
from rollout.generator.engines.routing import first_position
from rollout.generator.engines.vllm_adapter import adapter_arguments

_WORKER_EXTENSION = "rollout.generator.engines.vllm_worker.LoadsWeights"
_EXECUTOR = "rollout.generator.engines.nameless.Executor"
_REPORT_EVERY = 32  # tokens between two outputs of one request: each costs a task switch
_STREAM_EVERY = 4  # likewise where a client reads along
_MIN_BATCHED_TOKENS = 8192
_LAST_WORDS = 10  # lines of the log
HEAD = {"head_dtype": "float32"}
"""Logits are not rounded to bfloat16, as the learner's are not: from 16 on that would move each by up to 0.06 nats."""


def sampling_params(request: Generate) -> SamplingParams:
    """Only `stop_token_ids` and `stop` end a response early; what ends it is sampled, so it is part of the result.

    vLLM compares texts as they are sampled, and drops what an engine has sampled beyond the first one.
    """
    interval = _STREAM_EVERY if request.stream else _REPORT_EVERY

    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids,
        stop=request.stop,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        ignore_eos=True,
        logprobs=0,  # the sampled token's
        flat_logprobs=True,  # lists of numbers, no dictionary per token
        detokenize=bool(request.stop),
        output_kind=RequestOutputKind.DELTA,  # vLLM ignores the interval for cumulative outputs
        stream_interval=interval,
        routed_experts_prompt_start=first_position(request),
        skip_clone=True,
    )


def engine_arguments(context: ProcessContext) -> tuple[AsyncEngineArgs, bool]:
    """vLLM's arguments for this generator, and whether a tied model was given its own head (`RunFile.untied`)."""
    from transformers import AutoConfig

    config = context.run.config.generator
    options = engine_options(config)
    on_cpu = context.run.device == "cpu"
    model = str(context.run.model_folder or context.run.config.model.path)
    share, cache = device_memory(context.run)
    untied = context.run.untied and bool(AutoConfig.from_pretrained(model).tie_word_embeddings)
    adapter = served_adapter(context.run.config.model)
    arguments = AsyncEngineArgs(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy" if adapter is None else "auto",
        dtype=config.dtype,
        generation_config="vllm",  # the model folder's sampling defaults do not apply
        hf_overrides=HEAD | ({"tie_word_embeddings": False} if untied else {}),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or max(config.max_model_len, _MIN_BATCHED_TOKENS),
        # A seeded request whose prefill is split kills vLLM's CPU engine ("CPU Generator does not use offset").
        enable_chunked_prefill=not on_cpu,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        tensor_parallel_size=config.tensor_parallel,
        distributed_executor_backend=_EXECUTOR if config.tensor_parallel > 1 else None,
        enable_expert_parallel=options.expert_parallel,
        gpu_memory_utilization=share,
        kv_cache_memory_bytes=cache,
        block_size=kv_block(config, "cpu") if on_cpu else options.kv_block,
        enforce_eager=options.enforce_eager or on_cpu,
        enable_sleep_mode=context.run.config.alternates and not on_cpu,
        logprobs_mode="processed_logprobs",
        max_logprobs=1,
        seed=(context.run.config.seed * 1009 + context.index) % (1 << 31),
        worker_extension_cls=_WORKER_EXTENSION,
        enable_return_routed_experts=ROUTED_EXPERTS in COLUMNS and not on_cpu,
        disable_log_stats=True,
        enable_log_requests=False,
        **({} if adapter is None else adapter_arguments(adapter, model)),
    )
    return arguments, untied


def in_own_process(run: RunFile) -> bool:
    """Whether vLLM's core has a process beside the generator's, or a thread in it."""
    config = run.config.generator
    own_process: bool | None = engine_options(config).own_process
    if own_process is not None:
        return own_process
    return run.device != "cpu" or config.tensor_parallel > 1


def engine_info(config: VllmConfig) -> EngineInfo:
    cache = config.cache_config
    blocks_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
    return EngineInfo(
        kv_tokens=cache.kv_cache_size_tokens or blocks_tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_model_len=config.model_config.max_model_len,
    )


def engine_death(process: BaseProcess) -> EngineDied:
    """What ended an engine process, with the last lines of the log, which it shares with this process."""
    code = process.exitcode
    signal_name = signal.Signals(-code).name if code is not None and code < 0 else ""
    how = f"was killed by {signal_name}" if signal_name else f"ended with exit code {code}"
    if process.is_alive():
        how = "has failed, and does not end"
    if signal_name == "SIGKILL":
        how += ", which is how the kernel ends a process when memory is short"
    error = EngineDied(f"vLLM's engine process {process.pid} {how}")

    log = Path("/proc/self/fd/2")
    if log.is_file():
        last_words = log.read_text(errors="replace").splitlines()[-_LAST_WORDS:]
        error.add_note("\n".join(["The log before:", *last_words]))
    return error
