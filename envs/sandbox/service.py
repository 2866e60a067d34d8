"""The sandboxes of an environment server: a backend, and the threads in which its blocking work is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from envs.sandbox.base import Backend
from envs.sandbox.detect import BackendName, make_backend

T = TypeVar("T")


class SandboxService:
    """`slots`: sandboxes alive at once; `threads`: pieces of blocking work, and commands, at once."""

    def __init__(self, name: BackendName, slots: int, threads: int) -> None:
        self._name = name
        self._slots = slots
        self._thread_count = threads
        self._threads = ThreadPoolExecutor(threads, "sandbox-service")
        self._backend: Backend | None = None

    @property
    def backend(self) -> Backend:
        assert self._backend is not None, "start() comes first"
        return self._backend

    async def start(self) -> None:
        """Raises SandboxError, one line, where no sandbox can run."""
        self._backend = await asyncio.to_thread(make_backend, self._name, self._slots, self._thread_count)

    async def run(self, work: Callable[[], T]) -> T:
        """Wait for blocking work. It goes on in its thread when the caller is cancelled meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def stop(self) -> None:
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        if self._backend is not None:
            await asyncio.to_thread(self._backend.close)
