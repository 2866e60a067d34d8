"""The plan of a run: which processes, on which devices and cores, with which environment.

Each engine and rank has cores of one NUMA node to itself, near its GPU, and never fewer than it needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.gpus import Gpu
from launch.launcher.protocol import Node, Spec
from rl.config.algo import is_endpoint
from rl.config.schema import Config
from rl.wire.run import RunFile
from rollout.generator.engines.environment import VLLM_QUIET, engine_environment, engine_imports

_SPARE = 2  # for broker, proxy and environment servers, at least
_NODES = Path("/sys/devices/system/node")


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


def gpus_needed(config: Config, visible: int = 0) -> int:
    """GPUs of engines, learner ranks and a teacher that compute, where so many are visible; simulated ones need
    none."""
    engines, ranks = _gpus_of_each(config)
    together = max(engines, ranks) if shares_gpus(config, visible) else engines + ranks
    return together + has_own_teacher(config)


def has_own_teacher(config: Config) -> bool:
    """Whether the teacher of a distillation computes in a process of this run."""
    return config.algo.teacher is not None and not is_endpoint(config.algo.teacher) and learner_computes(config)


def shares_gpus(config: Config, visible: int) -> bool:
    """Whether each rank is on the GPU of an engine, or each engine on that of a rank, as far as there are both. They
    run there at the same time, or take turns."""
    each = _gpus_of_each(config)
    return all(each) and (
        config.placement in ("shared", "alternate") or (config.placement == "auto" and each == (1, 1) and visible == 1)
    )


def _gpus_of_each(config: Config) -> tuple[int, int]:
    engines = config.generator.engine == "vllm" and not config.supervised
    generators = config.generator.count * config.generator.tensor_parallel if engines else 0
    return generators, config.learner.ranks if learner_computes(config) else 0


def learner_computes(config: Config) -> bool:
    """Whether the learner computes: without a step to train, as in `fresco eval`, it only hands out weights and needs
    no GPU."""
    return config.learner.kind != "simulated" and config.steps > 0


def make_plan(
    config: Config, device: str, visible: Sequence[Gpu] = (), nodes: Mapping[int, list[int]] | None = None
) -> list[ProcessSpec]:
    """Processes in the order they start. GPUs, from those that are `visible`: generators first, then learner ranks,
    or both from the first on, where they share them.

    nodes: the cores by NUMA node, none where they are not known; None: this machine's.
    """
    generators = 0 if config.supervised else config.generator.count
    ranks = config.learner.ranks

    # A dry run may show the plan of another machine, whose GPUs are counted from 0.
    names = [gpu.name for gpu in visible]
    names += [str(number) for number in range(len(names), gpus_needed(config, len(visible)))]

    def gpus(first: int, count: int) -> tuple[str, ...]:
        return tuple(names[first : first + count]) if device == "cuda" else ()

    tensor_parallel = config.generator.tensor_parallel
    first_of_ranks = 0 if shares_gpus(config, len(visible)) else generators * tensor_parallel
    near = [gpu.numa for gpu in visible] + [None] * (generators * tensor_parallel + ranks)
    engine = engine_cores(device, config.generator.threads, tensor_parallel)
    rank_needs = rank_cores(device, config.learner.threads)
    needs = [Need(engine, near[index * tensor_parallel]) for index in range(generators)]
    needs += [Need(rank_needs, near[first_of_ranks + rank]) for rank in range(ranks)]
    shares = share_cores(needs, numa_nodes() if nodes is None else nodes)

    plan: list[ProcessSpec] = []
    if not config.supervised:
        plan += [ProcessSpec("broker", 0, "rollout.broker.process"), ProcessSpec("proxy", 0, "rollout.proxy.process")]

    # Learner ranks start first: the weights that they publish are what everyone waits for.
    learner = "rl.learner.simulated" if config.learner.kind == "simulated" else "rl.learner.process"
    imports: tuple[str, ...] = (learner,) if config.learner.kind != "simulated" and device == "cpu" else ()
    for rank in range(ranks):
        own = gpus(first_of_ranks + rank, 1) if learner_computes(config) else ()
        environment = _environment(own, config.learner.threads)
        cores = shares[generators + rank]
        plan.append(ProcessSpec("learner", rank, learner, own, cores, imports, environment))
    if config.supervised:
        return plan

    last = gpus_needed(config, len(visible)) - 1
    plan += _beside(config, device, gpus(last, 1) if has_own_teacher(config) else ())

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


def _beside(config: Config, device: str, gpus: tuple[str, ...]) -> Iterator[ProcessSpec]:
    """Teacher and parsers, which some runs have. gpus: the own ones of a teacher that computes here."""
    if config.algo.teacher is not None and config.steps:
        teacher = "rollout.teacher.process"
        imports: tuple[str, ...] = (teacher, "rl.models.policy") if has_own_teacher(config) and device == "cpu" else ()
        environment = _environment(gpus, config.learner.threads)
        yield ProcessSpec("teacher", 0, teacher, gpus, imports=imports, environment=environment)

    if config.chat.vllm_names:
        parsers = "rollout.parsers.process"
        imports = (parsers,) if device == "cpu" else ()
        yield ProcessSpec("parsers", 0, parsers, imports=imports, environment=_environment((), 1) | VLLM_QUIET)


def _environment(gpus: tuple[str, ...], threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads starve the other processes of a small machine
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        **({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpus else {}),  # the driver's numbers, which the plan is made of
    }


@dataclass(frozen=True)
class Need:
    """What cores one process needs. `near`: the NUMA node of its GPU, where that is known."""

    cores: int
    near: int | None = None


def engine_cores(device: str, threads: int, tensor_parallel: int) -> int:
    """The cores of one engine: its front end and its core, which both spin at full load; then its threads, or a process
    a GPU."""
    if device == "cpu":
        return 1 + threads * tensor_parallel
    return 2 + (tensor_parallel if tensor_parallel > 1 else 0)


def rank_cores(device: str, threads: int) -> int:
    """The cores of one learner rank: its threads; with a GPU one that feeds it and one that copies weights and
    listens."""
    return threads if device == "cpu" else max(2, threads)


def numa_nodes() -> dict[int, list[int]]:
    """The cores that this process may use, by NUMA node; one node where the kernel tells of none."""
    allowed = os.sched_getaffinity(0)
    nodes = {}
    for folder in _NODES.glob("node[0-9]*"):
        own = sorted(allowed & {int(path.name[3:]) for path in folder.glob("cpu[0-9]*")})
        if own:
            nodes[int(folder.name[4:])] = own
    return nodes or {0: sorted(allowed)}


def share_cores(needs: Sequence[Need], nodes: Mapping[int, list[int]]) -> list[tuple[int, ...]]:
    """Cores for each process, as many times its need as all can have; none for anybody if one would get too few.

    On a machine that is too small for that, the scheduler shares the cores better than a fixed split.
    """
    total = sum(len(cores) for cores in nodes.values())
    for times in range((total - _SPARE) // max(1, sum(need.cores for need in needs)), 0, -1):
        if shares := _fit(needs, nodes, times):
            return shares
    return [()] * len(needs)


def _fit(needs: Sequence[Need], nodes: Mapping[int, list[int]], times: int) -> list[tuple[int, ...]]:
    """The cores of each process; none if a process finds no node with room for all its cores. The node of its GPU is
    asked first."""
    free = {node: list(cores) for node, cores in nodes.items()}
    shares: list[tuple[int, ...]] = []
    for need in needs:
        wanted = need.cores * times
        node = max(free, key=lambda each: (len(free[each]) >= wanted, each == need.near, len(free[each])))
        if len(free[node]) < wanted:
            return []

        shares.append(tuple(free[node][:wanted]))
        del free[node][:wanted]
    return shares
