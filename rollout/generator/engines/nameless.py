"""Shared memory of vLLM's ranks loses its name once all have opened it, so it ends with them, however they end.

vLLM removes the names at an orderly end, and not all of them. What is left takes room that the next engine asks for.
"""

from __future__ import annotations

import contextlib
import re
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

_MAPPED = re.compile(r" (/dev/shm/(?:psm|vllm_dist)_\S+)$", re.M)
_unlink = SharedMemory.unlink


class Executor(MultiprocExecutor):
    """vLLM's own, in the process above the ranks: all have opened what there is before caches and graphs are made."""

    def _init_executor(self) -> None:
        expect_no_names()
        super()._init_executor()
        self.collective_rpc("names_forget")


def forget_names() -> None:
    """Of all that this process has mapped, which is known to every rank that needs it."""
    for path in set(_MAPPED.findall(Path("/proc/self/maps").read_text())):
        with contextlib.suppress(FileNotFoundError):  # another rank was here before
            Path(path).unlink()
            if "/psm_" in path:  # one of Python's, which else looks for it at the end
                resource_tracker.unregister(f"/{Path(path).name}", "shared_memory")


def expect_no_names() -> None:
    """Who made one removes it later, and would complain."""

    def unlink(memory: SharedMemory) -> None:
        with contextlib.suppress(FileNotFoundError):
            _unlink(memory)

    SharedMemory.unlink = unlink  # type: ignore[method-assign, assignment]
