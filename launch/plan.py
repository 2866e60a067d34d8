"""The plan of a run: which processes, on which devices and cores, with which environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from rl.core.config import Config
from rl.core.run import RunFile
from rollout.generator.engines.environment import engine_environment


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
        """The command line of this process; `rl.core.run` reads it."""
        options = {"--run": run.folder, "--index": self.index, "--incarnation": incarnation}
        return [sys.executable, "-m", self.module, *(str(part) for option in options.items() for part in option)]


def gpus_needed(config: Config) -> int:
    """GPUs of the engines and learner ranks that compute; simulated ones need none."""
    generators = config.generator.count * config.generator.tensor_parallel if config.generator.engine == "vllm" else 0
    return generators + (config.learner.ranks if config.learner.kind == "fsdp" else 0)


def make_plan(config: Config, device: str, cores: list[int] | None = None) -> list[ProcessSpec]:
    """Processes in the order they start. GPUs: generators first, then learner ranks.

    Cores are pinned only when every engine and rank can have some of its own; on a smaller machine
    the scheduler shares them better than a fixed split.
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    generators = config.generator.count
    ranks = config.learner.ranks
    per_process = len(cores) // (generators + ranks + 1)  # one share stays for broker, proxy and environment servers

    def gpus(first: int, count: int) -> tuple[int, ...]:
        return tuple(range(first, first + count)) if device == "cuda" else ()

    def share(place: int) -> tuple[int, ...]:
        return tuple(cores[place * per_process : (place + 1) * per_process])

    plan = [ProcessSpec("broker", 0, "rollout.broker.process"), ProcessSpec("proxy", 0, "rollout.proxy.process")]

    # Learner ranks start first: the weights that they publish are what everyone waits for.
    learner = "rl.learner.process" if config.learner.kind == "fsdp" else "rl.learner.simulated"
    tensor_parallel = config.generator.tensor_parallel
    for rank in range(ranks):
        own = gpus(generators * tensor_parallel + rank, 1)
        environment = _environment(own, config.learner.threads)
        plan.append(ProcessSpec("learner", rank, learner, own, share(generators + rank), environment))

    for index in range(generators):
        own = gpus(index * tensor_parallel, tensor_parallel)
        environment = _environment(own, config.generator.threads) | engine_environment(config, device)
        plan.append(ProcessSpec("generator", index, "rollout.generator.process", own, share(index), environment))

    for index in range(config.env.servers):
        plan.append(ProcessSpec("env_server", index, "envs.server", environment=_environment((), 1)))
    return plan


def _environment(gpus: tuple[int, ...], threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve the other processes of a small machine
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
    }
