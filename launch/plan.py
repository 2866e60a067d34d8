"""The plan of a run: which processes, on which devices and cores, with which environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from launch.cores import Need, engine_cores, numa_nodes, rank_cores, share_cores
from launch.gpus import Gpu
from launch.launcher.protocol import Node, Spec
from rl.config.schema import Config
from rl.wire.run import RunFile
from rollout.generator.engines.environment import VLLM_QUIET, engine_environment, engine_imports


@dataclass(frozen=True)
class ProcessSpec:
    role: str
    index: int
    module: str
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them
    cores: tuple[int, ...] = ()  # empty: not pinned
    imports: tuple[str, ...] = ()  # what takes seconds to import
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.role}.{self.index}"

    def complete(self, run: RunFile, incarnation: int, node: Node) -> Spec:
        """What a launcher is told of one incarnation of it."""
        return Spec(
            f"{self.name}.{incarnation}",
            self.module,
            tuple(self.arguments(run, incarnation, node)),
            self.environment | run.names.environment(self.role, self.index, incarnation),
            run.folder / "logs" / f"{self.name}.{incarnation}.log",
            self.gpus,
            self.cores,
            imports=self.imports,
        )

    def arguments(self, run: RunFile, incarnation: int, node: Node) -> list[str]:
        """`rl.wire.run` reads them."""
        control = run.address_of("control")
        if control is None:
            raise RuntimeError("processes are started before the supervisor listens")
        where = {"--run": run.folder, "--control": control, "--host": node.host}
        options = where | {"--index": self.index, "--incarnation": incarnation}
        return [str(part) for option in options.items() for part in option]


def gpus_needed(config: Config) -> int:
    """GPUs of the engines and learner ranks that compute; simulated ones need none."""
    generators = config.generator.count * config.generator.tensor_parallel if config.generator.engine == "vllm" else 0
    return generators + (config.learner.ranks if _learner_computes(config) else 0)


def _learner_computes(config: Config) -> bool:
    """Whether the learner computes: without a step to train, as in `fresco eval`, it only hands out weights and needs
    no GPU."""
    return config.learner.kind == "fsdp" and config.steps > 0


def make_plan(
    config: Config, device: str, visible: Sequence[Gpu] = (), nodes: dict[int, list[int]] | None = None
) -> list[ProcessSpec]:
    """Processes in the order they start. GPUs, from those that are `visible`: generators first, then learner ranks.

    nodes: the cores by NUMA node; None: this machine's.
    """
    generators = config.generator.count
    ranks = config.learner.ranks

    # A dry run may show the plan of another machine, whose GPUs are counted from 0.
    names = [gpu.name for gpu in visible]
    names += [str(number) for number in range(len(names), gpus_needed(config))]

    def gpus(first: int, count: int) -> tuple[str, ...]:
        return tuple(names[first : first + count]) if device == "cuda" else ()

    tensor_parallel = config.generator.tensor_parallel
    near = [gpu.numa for gpu in visible] + [None] * (generators * tensor_parallel + ranks)
    engine = engine_cores(device, config.generator.threads, tensor_parallel)
    rank_needs = rank_cores(device, config.learner.threads)
    needs = [Need(engine, near[index * tensor_parallel]) for index in range(generators)]
    needs += [Need(rank_needs, near[generators * tensor_parallel + rank]) for rank in range(ranks)]
    shares = share_cores(needs, numa_nodes() if nodes is None else nodes)

    plan = [ProcessSpec("broker", 0, "rollout.broker.process"), ProcessSpec("proxy", 0, "rollout.proxy.process")]

    # Learner ranks start first: the weights that they publish are what everyone waits for.
    learner = "rl.learner.process" if config.learner.kind == "fsdp" else "rl.learner.simulated"
    imports: tuple[str, ...] = (learner,) if config.learner.kind == "fsdp" and device == "cpu" else ()
    for rank in range(ranks):
        own = gpus(generators * tensor_parallel + rank, 1) if _learner_computes(config) else ()
        environment = _environment(own, config.learner.threads)
        cores = shares[generators + rank]
        plan.append(ProcessSpec("learner", rank, learner, own, cores, imports, environment))

    if config.chat.vllm_names:
        parsers = "rollout.parsers.process"
        imports = (parsers,) if device == "cpu" else ()
        plan.append(ProcessSpec("parsers", 0, parsers, imports=imports, environment=_environment((), 1) | VLLM_QUIET))

    for index in range(generators):
        own = gpus(index * tensor_parallel, tensor_parallel)
        environment = _environment(own, config.generator.threads) | engine_environment(config, device)
        imports = engine_imports(config, device)
        plan.append(
            ProcessSpec("generator", index, "rollout.generator.process", own, shares[index], imports, environment)
        )

    for index in range(config.env.servers):
        plan.append(ProcessSpec("env_server", index, "envs.server", environment=_environment((), 1)))
    return plan


def _environment(gpus: tuple[str, ...], threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve the other processes of a small machine
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
