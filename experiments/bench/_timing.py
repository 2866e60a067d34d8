"""Works measured in turns, so that their ratios hold on a busy machine."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable


def interleaved(works: dict[str, Callable[[], None]], rounds: int) -> dict[str, tuple[float, float]]:
    """(median wall ms, mean CPU ms) of each work, in turns, so that all see the same machine."""
    walls: dict[str, list[float]] = {name: [] for name in works}
    cpus = dict.fromkeys(works, 0.0)
    for _ in range(rounds):
        for name, work in works.items():
            cpu, begin = _cpu_s(), time.perf_counter()
            work()
            walls[name].append((time.perf_counter() - begin) * 1e3)
            cpus[name] += (_cpu_s() - cpu) * 1e3
    return {name: (statistics.median(walls[name]), cpus[name] / rounds) for name in works}


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
