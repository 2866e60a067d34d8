"""Which cores each engine and rank has to itself: of one NUMA node, near its GPU, and never fewer than it needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SPARE = 2  # for broker, proxy and environment servers, at least
_NODES = Path("/sys/devices/system/node")


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
        own = sorted(allowed & _cores((folder / "cpulist").read_text()))
        if own:
            nodes[int(folder.name[4:])] = own
    return nodes or {0: sorted(allowed)}


def share_cores(needs: Sequence[Need], nodes: dict[int, list[int]]) -> list[tuple[int, ...]]:
    """Cores for each process, as many times its need as all can have; none for anybody if one would get too few.

    On a machine that is too small for that, the scheduler shares the cores better than a fixed split.
    """
    total = sum(len(cores) for cores in nodes.values())
    for times in range((total - _SPARE) // max(1, sum(need.cores for need in needs)), 0, -1):
        if shares := _fit(needs, nodes, times):
            return shares
    return [()] * len(needs)


def _fit(needs: Sequence[Need], nodes: dict[int, list[int]], times: int) -> list[tuple[int, ...]]:
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


def _cores(listed: str) -> set[int]:
    """`0-3,8` as the kernel writes it."""
    cores: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1) if first else ())
    return cores
