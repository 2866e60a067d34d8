"""The machine that a plan is for: this one, or another that the command line describes.

--gpus 8x80 --host-memory 1T --cores 192
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from launch.gpus import Gpu, visible_gpus
from launch.plan import numa_nodes
from rl.config.schema import ConfigError

MIB = 1 << 20
GIB = 1 << 30
_USABLE = 0.99  # of the GiB that a GPU is sold by: 79.2 of 80
_UNITS = {"": 1, "M": MIB, "G": GIB, "T": 1 << 40}


@dataclass(frozen=True)
class Machine:
    """What is not known of it is not checked."""

    gpus: Sequence[Gpu] = ()
    memory: int | None = None
    """Bytes of its host."""
    nodes: Mapping[int, list[int]] = field(default_factory=dict)
    """Cores by NUMA node; none: unknown."""
    name: str = "a machine that is not named"

    @property
    def gpu_memory(self) -> int | None:
        """Bytes of its smallest GPU."""
        return min((gpu.memory for gpu in self.gpus if gpu.memory is not None), default=None)

    def __str__(self) -> str:
        each = f" of {size_text(self.gpu_memory)}" if self.gpu_memory else ""
        parts = [f"{len(self.gpus)} GPU{'s' if len(self.gpus) > 1 else ''}{each}"] if self.gpus else []
        parts += [f"{size_text(self.memory)} of memory"] if self.memory else []
        parts += [f"{cores} cores"] if (cores := sum(map(len, self.nodes.values()))) else []
        return f"{self.name}{': ' if parts else ''}{', '.join(parts)}"


def this_machine() -> Machine:
    return Machine(visible_gpus(), psutil.virtual_memory().total, numa_nodes(), "this machine")


def machine_of(arguments: argparse.Namespace) -> Machine | None:
    """The machine that the command line describes; None if it says nothing. Raises ConfigError."""
    gpus, memory, cores = arguments.gpus, arguments.host_memory, arguments.cores
    if gpus is None:
        if memory is not None or cores is not None:
            raise ConfigError(
                "--host-memory and --cores describe a machine with --gpus: name these as well (8x80, or 0)"
            )
        return None

    count, each = _gpus(gpus)
    listed = [Gpu(str(number), each) for number in range(count)]
    if cores is not None and not (cores.isdecimal() and int(cores)):
        raise ConfigError(f"--cores={cores}: a number of cores is wanted, for instance 192")
    nodes = {0: list(range(int(cores)))} if cores is not None else {}
    return Machine(listed, None if memory is None else _size(memory), nodes, f"--gpus {gpus}")


def _gpus(text: str) -> tuple[int, int | None]:
    """How many, and the bytes of each: `8x80` has GPUs that are sold as 80 GB, `8` does not say."""
    found = re.fullmatch(r"(\d{1,5})(?:x(\d+(?:\.\d+)?)(?:GB?)?)?", text)
    if found is None or (found[2] is not None and not float(found[2])):
        raise ConfigError(f"--gpus={text}: how many, and the GB of each: 8x80; or only how many: 8")
    return int(found[1]), None if found[2] is None else gpu_bytes(float(found[2]))


def gpu_bytes(gigabytes: float) -> int:
    """What a GPU that is sold with so many GB has."""
    return int(gigabytes * _USABLE * GIB)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MGT]?)(?:i?B)?", text)
    if found is None or not float(found[1]):
        raise ConfigError(f"--host-memory={text}: a size is wanted, for instance 512G or 1T")
    return int(float(found[1]) * _UNITS[found[2]])


def size_text(size: float) -> str:
    if size >= GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / MIB:.0f} MiB" if size >= MIB else f"{size / 1024:.0f} KiB"
