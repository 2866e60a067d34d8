"""A way out of a sandbox that leads to the gateway alone: a Unix socket in a folder that the sandbox is shown.

The sandbox has no network of its own. What it may ask the gateway for, its ticket's key says, as for everybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from rollout.episodes.environment import Endpoint

_CHUNK_BYTES = 1 << 16
_MOST_CONNECTIONS = 128  # of one sandbox at once; further ones are closed


@asynccontextmanager
async def gate(endpoint: Endpoint) -> AsyncIterator[Path]:
    """A folder with the socket `gateway`, for as long as the context is open."""
    folder = Path(tempfile.mkdtemp(prefix="fresco-gate-"))  # at once: a cancel in between would leave it
    relay = _Relay(endpoint)
    try:
        async with await asyncio.start_unix_server(relay.serve, sock=_listening(folder)):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        await relay.end()


def _listening(folder: Path) -> socket.socket:
    """Bound through the folder's descriptor, because the path of a socket has room for a hundred bytes only."""
    folder.chmod(0o711)
    listener = socket.socket(socket.AF_UNIX)
    descriptor = os.open(folder, os.O_PATH)
    try:
        listener.bind(f"/proc/self/fd/{descriptor}/gateway")
    finally:
        os.close(descriptor)
    (folder / "gateway").chmod(0o666)
    return listener


class _Relay:
    """Connections of one sandbox, each of its own to the gateway."""

    def __init__(self, endpoint: Endpoint) -> None:
        address = urlsplit(endpoint.base_url)
        self._host, self._port = address.hostname, address.port
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= _MOST_CONNECTIONS:
            writer.close()
            return

        self._tasks.add(task)
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
            await asyncio.gather(_pass_on(reader, back), _pass_on(there, writer))
        except OSError:
            writer.close()  # the gateway has ended
        finally:
            self._tasks.discard(task)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until one side has ended: the other one must see that, because it ends a generation."""
    try:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()
