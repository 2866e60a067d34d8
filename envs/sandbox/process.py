"""One command from start to end: input fed, output capped, deadline kept, the tree watched."""

from __future__ import annotations

import functools
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence

from envs.sandbox.base import Result
from envs.sandbox.memory import WATCH_S

_CHUNK_BYTES = 1 << 16
# For what is left in the pipes once every writer is dead.
_DRAIN_S = 1.0


class CappedOutput:
    """The first and the last half of a stream; the middle is counted and dropped.

    >>> capped = CappedOutput(4)
    >>> capped.add(b"abcdefgh")
    >>> capped.content(), capped.left_out
    (b'abgh', 4)
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.left_out = 0

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        surplus = len(self._tail) - self._half
        if surplus > 0:
            del self._tail[:surplus]
            self.left_out += surplus

    def content(self) -> bytes:
        return bytes(self._head + self._tail)

    def marked(self) -> bytes:
        """The content with a line in the middle that says how much is missing."""
        if not self.left_out:
            return self.content()
        return bytes(self._head) + _marker(self.left_out) + bytes(self._tail)


def _marker(left_out: int) -> bytes:
    return b"\n[... %d bytes left out ...]\n" % left_out


def cut_middle(data: bytes, limit: int, left_out: int = 0) -> str:
    """The output as text, cut to `limit` bytes and one line that says what is missing.

    `left_out`: bytes that are missing already, with their line in the middle.
    """
    marked = len(_marker(left_out)) if left_out else 0
    total = len(data) - marked + left_out
    if total <= limit:
        return data.decode(errors="replace")
    half = limit // 2
    head = data[:half]
    tail = data[-half:]
    return (head + _marker(total - len(head) - len(tail)) + tail).decode(errors="replace")


def run_command(
    argv: Sequence[str],
    stdin: bytes,
    timeout_s: float,
    output_bytes: int,
    *,
    separate_stderr: bool,
    environment: dict[str, str],
    kill: Callable[[], None],
    exceeded: Callable[[], bool] | None = None,
    status: int = -1,
) -> Result:
    """Run `argv` on the host; `kill` ends everything it started, and is always called before this returns.

    `exceeded` is asked every `WATCH_S` seconds where given; when it says yes the command is killed. `status`: a
    descriptor that it inherits.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if separate_stderr else subprocess.STDOUT,
        env=environment,
        cwd="/",
        pass_fds=[status] if status >= 0 else [],
    )
    pipes = _Pipes(process, stdin, output_bytes)

    out_of_memory = False
    try:
        while (left_s := begin + timeout_s - time.monotonic()) > 0 and not pipes.ended:
            pipes.serve(min(left_s, WATCH_S) if exceeded else left_s)
            if exceeded and exceeded():
                out_of_memory = True
                break

        timed_out = not pipes.ended and not out_of_memory
    finally:
        process.kill()
        kill()
        code = process.wait()
        pipes.drain()

    if timed_out or out_of_memory:
        code = 137
    streams = [output.marked() for output in pipes.outputs]
    return Result(
        exit_code=code if code >= 0 else 128 - code,
        output=streams[0],
        stderr=streams[1] if separate_stderr else b"",
        left_out_bytes=sum(output.left_out for output in pipes.outputs),
        seconds=time.monotonic() - begin,
        timed_out=timed_out,
        out_of_memory=out_of_memory,
    )


class _Pipes:
    """The pipes of one process, none of which can block the other, and its end, in one selector."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, output_bytes: int) -> None:
        self.ended = False
        self.outputs: list[CappedOutput] = []
        self._input = memoryview(stdin)
        self._selector = selectors.DefaultSelector()
        self._end = os.pidfd_open(process.pid)
        self._selector.register(self._end, selectors.EVENT_READ, self._exited)

        self._readers = [stream for stream in (process.stdout, process.stderr) if stream is not None]
        for stream in self._readers:
            output = CappedOutput(output_bytes)
            self.outputs.append(output)
            read = functools.partial(self._read, stream.fileno(), output)
            self._selector.register(stream.fileno(), selectors.EVENT_READ, read)

        assert process.stdin is not None
        self._stdin = process.stdin
        if stdin:
            os.set_blocking(self._stdin.fileno(), False)
            self._selector.register(self._stdin, selectors.EVENT_WRITE, self._feed)
        else:
            self._stdin.close()

    def serve(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def drain(self) -> None:
        """Take what is left once the writers are dead; close everything."""
        if not self._stdin.closed:
            self._close_stdin()
        self._selector.unregister(self._end)
        os.close(self._end)

        deadline = time.monotonic() + _DRAIN_S
        while self._selector.get_map() and time.monotonic() < deadline:
            self.serve(_DRAIN_S)
        self._selector.close()
        for stream in self._readers:
            stream.close()

    def _exited(self) -> None:
        self.ended = True

    def _read(self, descriptor: int, output: CappedOutput) -> None:
        data = os.read(descriptor, _CHUNK_BYTES)
        if data:
            output.add(data)
        else:
            self._selector.unregister(descriptor)

    def _feed(self) -> None:
        try:
            sent = os.write(self._stdin.fileno(), self._input[:_CHUNK_BYTES])
        except BrokenPipeError:
            sent = len(self._input)
        self._input = self._input[sent:]
        if not self._input:
            self._close_stdin()

    def _close_stdin(self) -> None:
        if self._stdin in {key.fileobj for key in self._selector.get_map().values()}:
            self._selector.unregister(self._stdin)
        self._stdin.close()
