"""The GPUs that a run may take: those that the user's CUDA_VISIBLE_DEVICES leaves it, in that order."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from rl.config.schema import ConfigError

_ANSWER_S = 60.0


@dataclass(frozen=True)
class Gpu:
    name: str
    """Its name as CUDA_VISIBLE_DEVICES names it: a number or a UUID."""
    memory: int | None
    """Bytes; None: a part of a GPU, whose size the driver's list does not say."""
    numa: int | None = None
    """The NUMA node that it is attached to, where the kernel knows."""


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process may use; none without a driver.

    Raises ConfigError where CUDA_VISIBLE_DEVICES names a GPU that is not there, or the driver does not answer.
    """
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total,pci.bus_id", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        why = "a driver that no process uses begins anew each time; sudo nvidia-smi -pm 1 keeps it"
        raise ConfigError(f"nvidia-smi has not answered for {_ANSWER_S:g} s: {why}") from None
    rows = [line.split(", ") for line in listed.stdout.splitlines()] if listed.returncode == 0 else []
    present = [(uuid, Gpu(index, int(mebibytes) << 20, _numa_node(bus))) for index, uuid, mebibytes, bus in rows]

    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [gpu for _, gpu in present]
    return [_find(name.strip(), present) for name in chosen.split(",") if name.strip() not in ("", "-1")]


def _numa_node(bus: str) -> int | None:
    """The NUMA node of a PCI device, named as the driver does (`00000000:1B:00.0`)."""
    file = Path("/sys/bus/pci/devices", bus.lower()[-12:], "numa_node")
    node = int(file.read_text()) if file.exists() else -1
    return node if node >= 0 else None


def _find(name: str, present: list[tuple[str, Gpu]]) -> Gpu:
    for uuid, gpu in present:
        # CUDA takes the beginning of a UUID as well. A part of a GPU (MIG-…) is not listed by itself.
        if name == gpu.name or (name.startswith("GPU-") and uuid.startswith(name)):
            return replace(gpu, name=name)
    if name.startswith("MIG-"):
        return Gpu(name, None)
    raise ConfigError(f"CUDA_VISIBLE_DEVICES: {name!r} is none of this machine's GPUs (nvidia-smi -L lists them)")
