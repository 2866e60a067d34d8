"""What every process of a run has: a life line to the supervisor.

    with Process("broker", context) as process:
        while not process.stopping:
            ...
            process.progress += 1

A thread owns the control socket: it registers, which says where this process listens and whom it looks for, sends
heartbeats (with the main loop's progress counter) and receives. Messages for the main loop are queued in
`process.inbox` and announced on `process.wake_fd` (readable while the inbox may hold something), which poll loops and
asyncio can watch.
A connection that broke is made again: then this process registers anew and repeats its last words, each of which counts
once, and the supervisor does the same.
The process dies with its parent (PR_SET_PDEATHSIG). An exception that leaves the block travels to the
supervisor as `Fatal` before the process exits non-zero.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import zmq
from msgspec.structs import replace

from rl.config.failures import EndsRun, cannot_write, ends_run
from rl.observe.alarms import Alarms, RunAlarm
from rl.observe.trace import Trace
from rl.observe.trace_events import Pulse, Wait
from rl.wire import messages
from rl.wire.cpu import wake_without_pushing
from rl.wire.messages import Message, ProtocolError
from rl.wire.receiving import Malformed, Receiver
from rl.wire.run import ProcessContext
from rl.wire.sockets import open_socket, send

_PR_SET_PDEATHSIG = 1
_PULSE_S = 1.0
_PR_SET_CHILD_SUBREAPER = 36
_REPEATED = 256  # last words to the supervisor, of which some may be lost with a connection

M = TypeVar("M")

_began_under = os.getppid()
"""The parent at the start of this process, as early as this module can know it."""


def _has_forked() -> None:
    global _began_under
    _began_under = os.getppid()


os.register_at_fork(after_in_child=_has_forked)


def die_with_parent(parent: int | str | None = None) -> None:
    """The kernel kills this process when its parent ends (Linux): the process `parent`, else $FRESCO_PARENT_PID, else
    the one under which it began. Where that is gone already, it ends here."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = parent or os.environ.get("FRESCO_PARENT_PID") or _began_under
    if os.getppid() != int(parent):
        print(f"the parent, process {parent}, died at once, or a wrapper forked", file=sys.stderr, flush=True)
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of grandchildren whose own parent dies (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Waits:
    """Seconds this process waited, by whom it waited for, and the longest wait.

    What a loop adds in turns for the same is one wait, until `ended` says that something has come. Before the first
    thing has come the run starts: no such wait is the longest.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.longest = Wait()
        self._under_way = Wait()
        self._has_begun = False

    @contextlib.contextmanager
    def on(self, whom: str, step: int = -1) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.add(whom, time.monotonic() - begin, step)

    def add(self, whom: str, seconds: float, step: int = -1) -> None:
        self.seconds[whom] = self.seconds.get(whom, 0.0) + seconds
        before = self._under_way
        goes_on = (before.whom, before.step) == (whom, step)
        self._under_way = Wait(seconds + before.seconds * goes_on, whom, step)
        if self._has_begun:
            self.longest = max(self.longest, self._under_way, key=lambda wait: wait.seconds)

    def ended(self) -> None:
        """What was waited for has come, or part of it."""
        self._under_way = Wait()
        self._has_begun = True


class WaitExpired(EndsRun, TimeoutError):
    """A wait ran past its deadline; the message says who waited for whom."""


class Process:
    """This process, as the supervisor sees it; see the head of this file.

    closing_report: gives this role's part of the summary, however the run ends.
    """

    def __init__(self, role: str, context: ProcessContext) -> None:
        self.role = role
        self.index = context.index
        self.incarnation = context.incarnation
        self.run = context.run
        self.config = context.run.config

        self.tick_s = self.config.timeouts.heartbeat_s / 2
        """The main loop turns at least this often, and each heartbeat tells a new `progress`."""
        self.progress = 0  # advanced by the main loop
        self.busy = False  # true while there is work: a frozen `progress` is then a hang
        self.stats: dict[str, float] = {}
        self.waits = Waits()
        self.stopping = False

        self.alarms = Alarms(
            self.config.alarms,
            lambda name, detail: self.send(messages.AlarmRaised(f"{role}.{self.index}", name, detail)),
        )
        self.trace = Trace(self.run.folder, role, self.index, self.incarnation, self.config.tracking.trace)
        self._next_pulse = 0.0
        self.closing_report: Callable[[], dict[str, Any]] | None = None

        self.inbox: queue.SimpleQueue[messages.SupervisorMessage] = queue.SimpleQueue()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._deaths: set[messages.PeerDied] = set()  # that were put into the inbox
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._told: deque[Message] = deque(maxlen=_REPEATED)
        self._tellings = itertools.count(1)
        self._outbox_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.run.addresses.on_questions(lambda: os.eventfd_write(self._outbox_fd, 1))
        self._registered: messages.Register  # as the supervisor was told
        self._finished = False
        self._thread = threading.Thread(target=self._serve_control, name="control", daemon=True)

    def __enter__(self) -> Process:
        die_with_parent()
        if self.run.device == "cpu":
            wake_without_pushing()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to handle
        # So is SIGTERM, which a batch system sends to every process. Not ignored: children would inherit that.
        signal.signal(signal.SIGTERM, lambda *_: None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self.stopping:
            if isinstance(error, RunAlarm):
                self.send(messages.AlarmRaised(f"{self.role}.{self.index}", error.name, error.detail))
            message = f"{type(error).__name__}: {error}"
            if cannot_write(error):
                message = f"{self.run.folder} cannot be written: {error}; make room, then resume=CHECKPOINT goes on"
            says_all = cannot_write(error) or (isinstance(error, EndsRun) and error.one_line)
            detail = "" if says_all else "".join(traceback.format_exception(kind, error, trace))
            self.send(messages.Fatal(self.role, self.index, message, detail, ends_run(error)))
        self.send_closing_report()

        self._finished = True
        os.eventfd_write(self._outbox_fd, 1)
        self._thread.join(timeout=10)  # it tells what is left to be told

        if error is not None:
            traceback.print_exception(kind, error, trace)
            sys.stderr.flush()
            os._exit(0 if self.stopping else 1)  # threads of libraries must not keep a failed process alive

    def send(self, message: messages.Metrics | messages.Fatal | messages.AlarmRaised | messages.Done) -> None:
        """Send to the supervisor; any thread may call it."""
        self._outbox.put(replace(message, seq=next(self._tellings)))
        os.eventfd_write(self._outbox_fd, 1)

    def send_closing_report(self) -> None:
        """Tell the supervisor that this role is done, with its part of the summary; only once."""
        if self.closing_report is not None:
            report = self.closing_report()
            self.closing_report = None
            self.send(messages.Done(self.role, json.dumps(report).encode()))

    def received(self) -> Iterator[messages.SupervisorMessage]:
        """Drain the inbox; call when `wake_fd` is readable, or at every turn of a loop."""
        clear_event(self.wake_fd)
        yield from _drained(self.inbox)

    def _serve_control(self) -> None:
        context = zmq.Context()  # its own, so that ending it means that the last words have left
        name = self.run.names.of(self.role, self.index, self.incarnation)
        socket = open_socket(zmq.DEALER, self.run, "control", identity=name, context=context)
        self._registered = self._registration()
        send(socket, self._registered)

        def again() -> None:
            for message in (self._registered, *self._told):
                send(socket, message)

        handlers = {socket: self._from_supervisor}
        receiver = Receiver(handlers, Malformed(self.role), self._outbox_fd, again={socket: again})
        next_beat = time.monotonic()

        while not self._finished:
            now = time.monotonic()
            if now >= next_beat:
                send(socket, self._heartbeat())
                next_beat = now + self.config.timeouts.heartbeat_s
            receiver.wait(max(0.0, next_beat - now))
            receiver.drain()
            clear_event(self._outbox_fd)
            self._speak(socket)

        self._speak(socket)  # what was put there before `_finished` was set
        send(socket, self._heartbeat())
        socket.close(linger=5000)
        context.term()

    def _registration(self) -> messages.Register:
        listens, needs = self.run.addresses.questions()
        return messages.Register(self.role, self.index, self.incarnation, listens, needs)

    def _speak(self, socket: zmq.SyncSocket) -> None:
        if (register := self._registration()) != self._registered:
            self._registered = register
            send(socket, register)
        for message in _drained(self._outbox):
            self._told.append(message)
            send(socket, message)

    def _from_supervisor(self, message: Message, _peer: bytes) -> None:
        if isinstance(message, messages.PeerListens):
            self.run.addresses.learn(message)
            os.eventfd_write(self.wake_fd, 1)
            return
        if not isinstance(message, messages.SupervisorMessage):
            raise ProtocolError(f"{type(message).__name__} from the supervisor")

        if isinstance(message, messages.Stop):
            self.stopping = self.stopping or not message.save_first
        elif message in self._deaths:  # told again after a connection broke
            return
        elif isinstance(message, messages.PeerDied):
            self._deaths.add(message)
            self.run.addresses.forget(message)
        self.inbox.put(message)
        os.eventfd_write(self.wake_fd, 1)

    def _heartbeat(self) -> messages.Heartbeat:
        stats = dict(self.stats)
        longest = self.waits.longest
        waits = dict(self.waits.seconds)  # read after it, and written before it: so they hold the longest as well
        if time.monotonic() >= self._next_pulse:
            self._next_pulse = time.monotonic() + _PULSE_S
            cpu_s = time.process_time()
            self.trace.add(Pulse(self.busy, self.progress, cpu_s, waits, stats, self.trace.cpu_s, longest))
        me = self.role, self.index, self.incarnation
        return messages.Heartbeat(*me, self.progress, self.busy, stats, waits, longest)


def clear_event(event_fd: int) -> bool:
    """An eventfd that may have been set is set no more. Whether it was."""
    try:
        return os.eventfd_read(event_fd) > 0
    except BlockingIOError:
        return False


def _drained(waiting: queue.SimpleQueue[M]) -> Iterator[M]:
    while not waiting.empty():  # there is no other reader
        yield waiting.get_nowait()


def leave() -> NoReturn:
    """End this process now. What was sent last leaves, within the sockets' linger; no thread is waited for.

    Nor is anything taken apart, which takes an interpreter with torch and vLLM seconds.
    """
    zmq.Context.instance().term()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
