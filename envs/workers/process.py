"""One worker process: how it is started, written to, heard and ended; and what can go wrong with one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from envs.workers.wire import CHUNK, Body, CurrentRequest, FrameReader, Result, WorkerReply, WorkerRequest, frame

START_DEADLINE_S = 120.0  # importing a large library from a slow disk


class RequestLost(RuntimeError):
    """The worker hung or died over this request, or refused it; the message says which."""


class WorkerHung(RequestLost):
    """The worker did not answer in time, which may be the machine's fault."""


class WorkerNotStarted(RequestLost):
    """No process can be started."""


@dataclass(frozen=True)
class WorkerKind(Generic[Result]):
    """What the processes of a pool run: `python -m module PAGE *arguments`, see `envs.workers.serving`."""

    name: str  # for messages: "a game worker"
    module: str
    result: type[Result]
    deadline_s: float  # of a request, from when it became the oldest, by `WorkerProcess.clock`; then it is killed
    arguments: Sequence[str] = ()
    keeps_state: bool = True  # of sessions, so that the worker has to hear of their end


class WorkerProcess(Generic[Body, Result]):
    """One process: `take` is called with every reply, `ended` is set once no more can come."""

    def __init__(self, kind: WorkerKind[Result], take: Callable[[WorkerReply[Result]], None]) -> None:
        self.ended = asyncio.Event()
        self.current = CurrentRequest()
        self._kind = kind
        self._take = take
        self._reader: FrameReader[WorkerReply[Result]] = FrameReader(WorkerReply[kind.result])  # type: ignore[name-defined]
        self._ready = asyncio.get_running_loop().create_future()
        self._replies = -1  # the descriptor that replies arrive on, while it is open
        self._handle = -1  # of the process, while it is open
        self._schedule = -1  # the kernel's count of what its main thread got and waited for, while it is open
        self._queued_s = 0.0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, once it is closed; a signal's number below 0."""
        return self._process.returncode if self._process is not None else None

    async def start(self) -> None:
        """Raises WorkerNotStarted. `close` comes after it in any case."""
        name = self._kind.name
        page = self.current.descriptor
        variables = {"FRESCO_PARENT_PID": str(os.getpid()), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self._replies, theirs = os.pipe()

        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", self._kind.module, str(page), *self._kind.arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=theirs,
                pass_fds=(page,),
                env=os.environ | variables,
            )
            self._handle = os.pidfd_open(self._process.pid)
            self._schedule = _open_schedule(self._process.pid)
        except OSError as error:
            raise WorkerNotStarted(f"{name} cannot be started: {error}") from error

        finally:
            os.close(theirs)
            self.current.close_descriptor()

        asyncio.get_running_loop().add_reader(self._replies, self._readable)
        due = self.clock() + START_DEADLINE_S
        while not self._ready.done() and (left_s := due - self.clock()) > 0:
            await asyncio.wait((self._ready,), timeout=left_s)
        if not self._ready.done() or not self._ready.result():
            raise WorkerNotStarted(f"{name} did not start in {START_DEADLINE_S:g} s, or ended before it served")

    def write(self, request: WorkerRequest[Body]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(frame(request))

    def clock(self) -> float:
        """Seconds that stand still while the process is ready to run and has no core.

        So a deadline by it follows what the process does. On a crowded machine it ends a process that sleeps, or that
        never comes to an end, and not one that is kept from its work. Where the kernel does not count this, it is the
        plain clock.
        """
        if self._schedule >= 0:
            with contextlib.suppress(ProcessLookupError):  # it is dead: what was counted last
                _, queued_ns, _ = os.pread(self._schedule, 128, 0).split()
                self._queued_s = int(queued_ns) / 1e9
        return asyncio.get_running_loop().time() - self._queued_s

    def kill(self) -> None:
        """Kill it by the kernel's handle: asyncio's `kill` may reap a dead process itself, and its exit code is lost
        then."""
        if self._handle >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    async def close(self) -> None:
        """Kill it and reap it."""
        self._close_replies()
        self.kill()
        if self._process is not None:
            await self._process.wait()
        for descriptor in self._handle, self._schedule:
            if descriptor >= 0:
                os.close(descriptor)
        self._handle = -1
        self._schedule = -1

    def _readable(self) -> None:
        """Called by the event loop: no task and no stream between the pipe and whoever waits."""
        chunk = os.read(self._replies, CHUNK)
        for reply in self._reader.feed(chunk):
            if reply.number:
                self._take(reply)
            else:
                self._ready.set_result(True)
        if chunk:
            return

        self._close_replies()
        self.ended.set()
        if not self._ready.done():
            self._ready.set_result(False)

    def _close_replies(self) -> None:
        if self._replies >= 0:
            asyncio.get_running_loop().remove_reader(self._replies)
            os.close(self._replies)
        self._replies = -1


def _open_schedule(pid: int) -> int:
    """A descriptor, or a number below 0 where the kernel was built without it."""
    try:
        return os.open(f"/proc/{pid}/schedstat", os.O_RDONLY)
    except FileNotFoundError:
        return -1
