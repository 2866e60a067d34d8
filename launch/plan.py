"""The plan of a run: which processes, on which devices and cores, with which environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from rl.core.config import Config
from rl.core.run import RunFile
from rollout.generator.engines.environment import engine_environment

ROLES = ("broker", "proxy", "generator", "env_server", "learner")


@dataclass(frozen=True)
class ProcessSpec:
    role: str
    index: int
    module: str
    gpus: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()  # empty: not pinned
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role}.{self.index}"

    def command(self, run: RunFile, incarnation: int) -> list[str]:
        return [
            sys.executable, "-m", self.module,
            "--run", str(run.folder), "--index", str(self.index), "--incarnation", str(incarnation),
        ]  # fmt: skip


def gpus_needed(config: Config) -> int:
    generators = config.generator.count * config.generator.tensor_parallel if config.generator.engine == "vllm" else 0
    return generators + (config.learner.ranks if config.learner.kind == "fsdp" else 0)


def make_plan(config: Config, device: str, cores: list[int] | None = None) -> list[ProcessSpec]:
    """Processes in the order they start. GPUs: generators first, then learner ranks.

    Cores are pinned only when every engine and rank can have some of its own; on a smaller machine
    the scheduler shares them better than a fixed split.
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    heavy = config.generator.count + config.learner.ranks
    per_process = len(cores) // (heavy + 1)  # one share stays for broker, proxy and environment servers
    shares = [tuple(cores[i * per_process : (i + 1) * per_process]) for i in range(heavy)]
    learner_module = "rl.learner.process" if config.learner.kind == "fsdp" else "rl.learner.simulated"
    tensor_parallel = config.generator.tensor_parallel
    first_learner_gpu = config.generator.count * tensor_parallel

    plan = [ProcessSpec("broker", 0, "rollout.broker.process"), ProcessSpec("proxy", 0, "rollout.proxy.process")]
    for rank in range(config.learner.ranks):  # first: the weights it publishes are what everyone waits for
        gpus: tuple[int, ...] = (first_learner_gpu + rank,) if device == "cuda" else ()
        environment = _environment(gpus, config.learner.threads)
        plan.append(
            ProcessSpec("learner", rank, learner_module, gpus, shares[config.generator.count + rank], environment)
        )
    for index in range(config.generator.count):
        gpus = tuple(range(index * tensor_parallel, (index + 1) * tensor_parallel)) if device == "cuda" else ()
        environment = _environment(gpus, config.generator.threads) | engine_environment(config, device)
        plan.append(ProcessSpec("generator", index, "rollout.generator.process", gpus, shares[index], environment))
    for index in range(config.env.servers):
        plan.append(ProcessSpec("env_server", index, "envs.server", environment=_environment((), 1)))
    return plan


def _environment(gpus: tuple[int, ...], threads: int) -> dict[str, str]:
    values = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve the other processes of a small machine
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
    }
    return values
