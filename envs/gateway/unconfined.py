"""A program without a sandbox: limits of each process, a deadline, and nothing of it is left.

It runs in a process namespace of its own, where the kernel kills whatever it has started. Without the right to make one
(root), its process group is killed instead. It sees the files and the network of whoever runs Fresco.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import shutil
import signal
from collections.abc import Mapping, Sequence
from typing import Protocol

from rl.wire.process import die_with_parent


class Limited(Protocol):
    """What is read here of `envs.gateway.command.Command`."""

    @property
    def arguments(self) -> Sequence[str]: ...
    @property
    def deadline_s(self) -> float: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def output_bytes(self) -> int: ...


async def run_unconfined(
    command: Limited, given: bytes, variables: Mapping[str, str], folder: str
) -> tuple[int, bytes, bytes]:
    """Exit status, output and errors; raises TimeoutError past the deadline."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *_alone(),
            *command.arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
            env=dict(variables),
            start_new_session=True,
            preexec_fn=functools.partial(_limit, command, os.getpid()),
        )
    )

    try:
        process = await asyncio.shield(starting)

        async with asyncio.timeout(command.deadline_s):
            output, errors, _ = await asyncio.gather(
                _read(process.stdout, command.output_bytes),
                _read(process.stderr, command.output_bytes),
                _feed(process.stdin, given),
            )

            return await process.wait(), output, errors
    finally:
        # A cancelled start would kill `unshare` alone, perhaps before its child has asked to end with it.
        process = await starting

        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _limit(command: Limited, parent: int) -> None:
    """Set the limits, in the child, before the program."""
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_AS, (command.memory_bytes, command.memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (command.file_bytes, command.file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@functools.cache
def _alone() -> tuple[str, ...]:
    """What gives the program a process namespace of its own, which ends with its first process."""
    unshare = shutil.which("unshare") if os.geteuid() == 0 else None
    return (unshare, "--pid", "--fork", "--kill-child", "--mount-proc") if unshare else ()


async def _feed(stream: asyncio.StreamWriter | None, data: bytes) -> None:
    assert stream is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a program need not read its task
        stream.write(data)
        await stream.drain()
    stream.close()


async def _read(stream: asyncio.StreamReader | None, limit: int) -> bytes:
    """The last `limit` bytes: the outcome comes last."""
    assert stream is not None
    kept = b""
    while data := await stream.read(1 << 16):
        kept = (kept + data)[-limit:]
    return kept
