"""One command from start to end: input fed, output capped, deadline kept, the tree watched."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence

from envs.swe.sandbox.base import Result
from envs.swe.sandbox.memory import WATCH_S

_CHUNK = 1 << 16
_DRAIN_S = 1.0  # for what is left in the pipes once every writer is dead


class Capped:
    """The first and the last half of a stream; the middle is counted and dropped.

    >>> capped = Capped(4)
    >>> capped.add(b"abcdefgh")
    >>> capped.content(), capped.left_out
    (b'abgh', 4)
    """

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._head, self._tail = bytearray(), bytearray()
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


def shortened(result: Result, limit: int) -> str:
    """The output of a command whose streams are merged, cut to `limit` bytes and one line that says what is missing."""
    marker = len(_marker(result.left_out_bytes)) if result.left_out_bytes else 0
    total = len(result.output) - marker + result.left_out_bytes
    if total <= limit:
        return result.text()
    half = limit // 2
    head, tail = result.output[:half], result.output[-half:]
    return (head + _marker(total - len(head) - len(tail)) + tail).decode(errors="replace")


def run_command(
    argv: Sequence[str], stdin: bytes, timeout_s: float, output_bytes: int, *, separate_stderr: bool,
    environment: dict[str, str], kill: Callable[[], None], exceeded: Callable[[], bool] | None = None,
) -> Result:  # fmt: skip
    """Run `argv` on the host; `kill` ends everything it started, and is always called before this returns.

    `exceeded` is asked every `WATCH_S` seconds where given; when it says yes the command is killed.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd="/",
        stderr=subprocess.PIPE if separate_stderr else subprocess.STDOUT,
    )  # fmt: skip
    pump = _Pump(process, stdin, output_bytes)
    try:
        over = False
        while (left_s := begin + timeout_s - time.monotonic()) > 0 and not pump.ended:
            pump.turn(min(left_s, WATCH_S) if exceeded else left_s)
            if exceeded and exceeded():
                over = True
                break
        timed_out = not pump.ended and not over
    finally:
        process.kill()
        kill()
        code = process.wait()
        pump.drain()
    if timed_out or over:
        code = 137
    streams = [capped.marked() for capped in pump.captured]
    return Result(
        exit_code=code if code >= 0 else 128 - code,
        output=streams[0],
        stderr=streams[1] if separate_stderr else b"",
        left_out_bytes=sum(capped.left_out for capped in pump.captured),
        seconds=time.monotonic() - begin,
        timed_out=timed_out,
        out_of_memory=over,
    )


class _Pump:
    """The pipes of one process, none of which can block the other, and its end, in one selector."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, output_bytes: int) -> None:
        self.ended = False
        self.captured: list[Capped] = []
        self._input = memoryview(stdin)
        self._selector = selectors.DefaultSelector()
        self._end = os.pidfd_open(process.pid)
        self._selector.register(self._end, selectors.EVENT_READ, self._exited)
        assert process.stdin is not None
        self._stdin = process.stdin
        self._readers = [stream for stream in (process.stdout, process.stderr) if stream is not None]
        for stream in self._readers:
            self._register(stream, Capped(output_bytes))
        if stdin:
            os.set_blocking(self._stdin.fileno(), False)
            self._selector.register(self._stdin, selectors.EVENT_WRITE, self._feed)
        else:
            self._stdin.close()

    def turn(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def drain(self) -> None:
        """Take what is left once the writers are dead; close everything."""
        if not self._stdin.closed:
            self._done_feeding()
        self._selector.unregister(self._end)
        os.close(self._end)
        deadline = time.monotonic() + _DRAIN_S
        while self._selector.get_map() and time.monotonic() < deadline:
            self.turn(_DRAIN_S)
        self._selector.close()
        for stream in self._readers:
            stream.close()

    def _register(self, stream: object, capped: Capped) -> None:
        self.captured.append(capped)
        descriptor = stream.fileno()  # type: ignore[attr-defined]

        def read() -> None:
            data = os.read(descriptor, _CHUNK)
            if data:
                capped.add(data)
            else:
                self._selector.unregister(descriptor)

        self._selector.register(descriptor, selectors.EVENT_READ, read)

    def _exited(self) -> None:
        self.ended = True

    def _feed(self) -> None:
        try:
            sent = os.write(self._stdin.fileno(), self._input[:_CHUNK])
        except BrokenPipeError:
            sent = len(self._input)
        self._input = self._input[sent:]
        if not self._input:
            self._done_feeding()

    def _done_feeding(self) -> None:
        if self._stdin in {key.fileobj for key in self._selector.get_map().values()}:
            self._selector.unregister(self._stdin)
        self._stdin.close()
