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

    def open(self) -> None:
        """Start, which blocks. Raises SandboxError, one line, where no sandbox can run."""
        self._backend = make_backend(self._name, self._slots, self._thread_count)

    async def start(self) -> None:
        """The same as `open`, without blocking the loop."""
        await asyncio.to_thread(self.open)

    async def run(self, work: Callable[[], T]) -> T:
        """Wait for blocking work. It goes on in its thread when the caller is cancelled meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def entered(self, work: Callable[[], T], undo: Callable[[T], object]) -> T:
        """The same as `run`; what work has made although the caller was cancelled meanwhile is undone."""
        making = asyncio.ensure_future(self.run(work))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            made = await making
            await self.run(lambda: undo(made))
            raise

    def close(self) -> None:
        """Blocks until what runs has ended."""
        self._threads.shutdown(cancel_futures=True)
        if self._backend is not None:
            self._backend.close()

    async def stop(self) -> None:
        """The same as `close`, without blocking the loop."""
        await asyncio.to_thread(self.close)
