"""Options of vLLM, and the environment variables it needs before its libraries are imported.

The supervisor puts them into the environment of each generator process; nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl.config.schema import Config
from rl.config.section import Section, Where

_VLLM_IMPORTS = (
    "rollout.generator.engines.vllm",
    "rollout.generator.engines.vllm_worker",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)

UNPACKED_VARIABLE = "FRESCO_UNPACKED_WEIGHTS"
"""Not empty: linear layers on a CPU keep their weights as they are loaded (`vllm_internals.heed_environment`)."""

VLLM_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


class VllmOptions(Section):
    """`generator.options` of vLLM."""

    where = "engine=vllm"
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Tokens of one engine step; null: enough for a whole context."""
    kv_block: int | None = Field(None, ge=16, multiple_of=16)
    """Tokens of one KV block, the grain of prefix reuse; null: 32 on CPU, vLLM's default on GPUs."""
    gpu_memory_utilization: Annotated[float, Where("GPUs")] = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory for the engine."""
    enforce_eager: Annotated[bool, Where("GPUs")] = True
    """No CUDA graphs."""
    own_process: bool | None = None
    """vLLM's core in a process beside the generator's; null: on GPUs, and with tensor_parallel above 1."""


def engine_imports(config: Config, device: str) -> tuple[str, ...]:
    """What a generator process on `device` and its engine take seconds to import."""
    return _VLLM_IMPORTS if config.generator.engine == "vllm" and device == "cpu" else ()


def engine_environment(config: Config, device: str) -> dict[str, str]:
    """Variables for one generator process on `device` (`cpu` or `cuda`)."""
    if config.generator.engine != "vllm":
        return {}

    variables = VLLM_QUIET | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}

    if device == "cpu":
        variables |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker shares the engine core's process
            "OMP_NUM_THREADS": str(config.generator.threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # idle OpenMP threads must not spin beside other processes
            "TORCHDYNAMO_DISABLE": "1",  # else the first request with logprobs compiles for seconds
        }
        variables[UNPACKED_VARIABLE] = "1" if config.generator.dtype == "float32" else ""
    return variables
