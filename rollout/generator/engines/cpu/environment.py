"""Environment variables of a vLLM engine on a CPU; nothing here imports torch."""

from __future__ import annotations

from rl.config.schema import Config

UNPACKED_VARIABLE = "FRESCO_UNPACKED_WEIGHTS"
"""If this variable is not empty, linear layers keep their weights as they are loaded (`unpacked.heed_environment`)."""

VLLM_IMPORTS = (
    "rollout.generator.engines.vllm",
    "rollout.generator.engines.vllm_worker",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
"""What a generator process and its engine take seconds to import."""


def vllm_variables(config: Config) -> dict[str, str]:
    """The variables that an engine on GPUs has not."""
    several = config.generator.tensor_parallel > 1
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker shares the engine core's process
        "OMP_NUM_THREADS": str(config.generator.threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # idle OpenMP threads must not spin beside other processes
        "TORCHDYNAMO_DISABLE": "1",  # else the first request with logprobs compiles for seconds
        UNPACKED_VARIABLE: "1" if config.generator.dtype == "float32" else "",
        **({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if several else {}),  # else vLLM wants a NUMA node for each rank
    }
