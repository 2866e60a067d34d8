"""What this process and its children hold: processes, threads, files, tasks, memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from dataclasses import dataclass
from pathlib import Path

import psutil

MEMORY_PER_EPISODE = 20_000  # bytes that an episode may leave behind, such as by filling caches
MEMORY_SLACK = 12 << 20  # of allocators


@dataclass(frozen=True)
class Held:
    processes: int
    threads: int
    descriptors: int
    tasks: int
    temporary_files: int
    memory: int  # bytes

    def growth(self, later: Held, episodes: int) -> list[str]:
        """What has become more since, in words; `episodes` were played in between."""
        grown = []
        for name in ("processes", "threads", "descriptors", "tasks", "temporary_files"):
            before = getattr(self, name)
            after = getattr(later, name)
            if after > before + max(1, episodes // 10):  # a worker that was replaced, a thread of a pool
                grown.append(f"{name.replace('_', ' ')} from {before} to {after}")

        more = later.memory - self.memory
        if more > MEMORY_SLACK + MEMORY_PER_EPISODE * episodes:
            grown.append(f"memory by {more / 2**20:.0f} MB ({more / episodes / 1000:.0f} kB an episode)")
        return grown


def held(temporary: Path) -> Held:
    """What is held now; `temporary` is the folder for temporary files that only this check uses."""
    gc.collect()
    own = psutil.Process()
    processes = [own, *own.children(recursive=True)]
    threads = descriptors = memory = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied), process.oneshot():
            threads += process.num_threads()
            descriptors += process.num_fds()
            memory += process.memory_info().rss

    files = sum(1 for _ in temporary.rglob("*"))
    return Held(len(processes), threads, descriptors, len(asyncio.all_tasks()), files, memory)
