"""Environment variables an engine needs before its libraries are imported.

The supervisor puts them into the environment of each generator process; nothing here imports torch.
"""

from __future__ import annotations

from rl.config.schema import Config
from rollout.generator.engines.cpu import environment as on_cpu

VLLM_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def engine_imports(config: Config, device: str) -> tuple[str, ...]:
    """What a generator process on `device` and its engine take seconds to import."""
    return on_cpu.VLLM_IMPORTS if config.generator.engine == "vllm" and device == "cpu" else ()


def engine_environment(config: Config, device: str) -> dict[str, str]:
    """Variables for one generator process on `device` (`cpu` or `cuda`)."""
    if config.generator.engine != "vllm":
        return {}

    variables = VLLM_QUIET | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    return variables | on_cpu.vllm_variables(config) if device == "cpu" else variables
