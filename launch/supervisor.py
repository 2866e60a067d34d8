"""The supervisor: starts every process of the plan, watches, restarts, tears down, reports.

It is the one fence of a run: a process is dead when the kernel says so here, and only then do its peers
hear `PeerDied`. A *killed* generator or environment server is started again (its work is issued again by
broker and proxy); a Python exception in any role, or the death of broker, proxy or learner, ends the run
with the first cause (`launch.recovery` goes on from a checkpoint after such a death). Every end - success,
failure, Ctrl-C - leaves no process, socket or shared memory.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from dataclasses import dataclass, field

import zmq

from launch.children import Child, adopt_orphans, descendants, end_all, end_descendants, log_tail, spawn
from launch.live import Display
from launch.plan import ProcessSpec
from launch.summary import Observed, build_summary
from rl.core.messages import Done, Fatal, Heartbeat, Message, Metrics, PeerDied, ProtocolError, Register, Stop
from rl.core.run import RunFile
from rl.core.sockets import PeerGone, identity, open_socket, receive_from, send_to
from rl.core.tracking import Tracker
from rl.weights.segment import unlink_segments

_REPLACEABLE = {"generator": "generator", "env_server": "env"}  # role -> section with max_restarts
_TOLD = ("broker", "proxy", "learner")  # who hears of the replaceable ones
_POLL_MS = 50
_TRACKER_S = 30.0  # an online dashboard may still be sending
_LAST_WORDS_S = 2.0
_TRACKER_HURRIED_S = 1.5  # after Ctrl-C or a failure: with timeouts.stop_s, all ends within 10 s


class RunFailed(RuntimeError):
    """The first cause, in one line; `detail` is a traceback, state dump or log tail."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class Interrupted(Exception):
    """Ctrl-C or SIGTERM."""


@dataclass
class _State:
    children: dict[tuple[str, int], Child] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    reports: dict[str, bytes] = field(default_factory=dict)  # closing reports by role
    suspected: dict[str, str] = field(default_factory=dict)  # why a child was killed by us
    deaths: list[PeerDied] = field(default_factory=list)  # for whoever registers later


class Supervisor:
    def __init__(self, run: RunFile, plan: list[ProcessSpec]) -> None:
        self.run, self.config, self.plan = run, run.config, plan
        self._others = descendants()  # of whoever runs this in a process of theirs
        self.state = _State()
        self.observed = Observed(run.started_at, run.start_step)
        self.tracker = Tracker(self.config.tracking, run.folder, self.config.name, self.config.model_dump(mode="json"))
        self.display = Display(self.config, run)
        self.lost = False  # broker, proxy or learner was killed: the run may go on from a checkpoint
        self._socket: zmq.Socket | None = None

    def execute(self) -> int:
        """Run to the end. Returns the exit code: 0 success, 1 failure, 130 interrupted."""
        error: RunFailed | None = None
        interrupted = False
        adopt_orphans()
        handlers = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._start()
            self._watch()
        except RunFailed as failure:
            error = failure
        except Interrupted:
            interrupted = True
        finally:
            for number in handlers:  # a second Ctrl-C must not interrupt the clean-up
                signal.signal(number, signal.SIG_IGN)
            reason = "interrupted" if interrupted else str(error) if error else "finished"
            self._tear_down(reason, _TRACKER_S if reason == "finished" else _TRACKER_HURRIED_S)
        idle = self.observed.idle_fraction(self.state.children)
        summary = build_summary(self.run, self.state.reports, self.observed, str(error) if error else "", idle)
        (self.run.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        self.display.close(summary, error, interrupted)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return 130 if interrupted else 1 if error else 0

    # ------------------------------------------------------------ start and watch

    def _start(self) -> None:
        self._socket = open_socket(zmq.ROUTER, self.run, "control", bind=True)
        for spec in self.plan:
            self.state.children[spec.role, spec.index] = spawn(spec, self.run, 0)

    def _watch(self) -> None:
        assert self._socket is not None
        while not {"broker", "learner"} <= self.state.reports.keys():
            if self._socket.poll(_POLL_MS):
                self._drain()
            self._check_children()
            self.display.refresh(self.observed, self.state.children)

    def _drain(self) -> None:
        assert self._socket is not None
        while True:
            try:
                _peer, message = receive_from(self._socket)
            except zmq.Again:
                return
            except ProtocolError as error:
                raise RunFailed(f"supervisor received a malformed control message: {error}") from None
            self._handle(message)

    def _handle(self, message: Message) -> None:
        match message:
            case Heartbeat():
                self._beat(message)
            case Register():
                child = self._child(message.role, message.index, message.incarnation)
                if child is not None:
                    child.registered, child.last_beat = True, time.monotonic()
                    self._catch_up(child)
            case Metrics():
                self._record(message)
            case Fatal():
                name = f"{message.role}.{message.index}"
                raise RunFailed(f"{name}: {message.message}", message.detail)
            case Done():
                self.state.reports[message.role] = message.report

    def _child(self, role: str, index: int, incarnation: int) -> Child | None:
        child = self.state.children.get((role, index))
        return child if child is not None and child.incarnation == incarnation else None

    def _beat(self, beat: Heartbeat) -> None:
        child = self._child(beat.role, beat.index, beat.incarnation)
        if child is None:
            return
        now = time.monotonic()
        child.last_beat = now
        if beat.progress != child.last_progress or not beat.busy:
            child.last_progress, child.progressed = beat.progress, now
        child.busy, child.stats, child.waits = beat.busy, beat.stats, beat.waits

    def _record(self, row: Metrics) -> None:
        values = dict(row.values)
        if "train/loss" in values:
            values |= self.observed.step_values(row.step, self.state.children)
        self.observed.add(row.step, values)
        self.tracker.log(row.step, values, row.histograms)
        self.display.row(row.step, values)

    # ------------------------------------------------------------ failures

    def _check_children(self) -> None:
        limits, now = self.config.timeouts, time.monotonic()
        for child in list(self.state.children.values()):
            if child.popen.poll() is not None:
                self._drain()  # its last words, if any, are the first cause
                self._child_ended(child)
            elif not child.registered and now - child.started > limits.start_s:
                raise RunFailed(
                    f"{child.name} did not start within timeouts.start_s={limits.start_s:g} s", log_tail(child.log)
                )
            elif child.registered and now - child.last_beat > limits.hang_s:
                self._suspect(child, f"no heartbeat for {limits.hang_s:g} s")
            elif child.registered and child.busy and now - child.progressed > limits.hang_s:
                self._suspect(child, f"busy without progress for {limits.hang_s:g} s")

    def _suspect(self, child: Child, why: str) -> None:
        self.state.suspected[f"{child.name}.{child.incarnation}"] = why
        child.kill()

    def _child_ended(self, child: Child) -> None:
        code = child.popen.returncode
        why = self.state.suspected.get(f"{child.name}.{child.incarnation}")
        how = why or (f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
        role = child.spec.role
        self.lost = role not in _REPLACEABLE and (code < 0 or why is not None)
        if role not in _REPLACEABLE or (code >= 0 and why is None):
            raise RunFailed(f"{child.name} ended: {how}", log_tail(child.log))
        allowed = getattr(self.config, _REPLACEABLE[role]).max_restarts
        used = self.state.restarts.get(child.name, 0)
        if used >= allowed:
            raise RunFailed(f"{child.name} ended: {how}; it was restarted {used} times already", log_tail(child.log))
        self.state.restarts[child.name] = used + 1
        child.kill()  # what is left of its process group
        self.display.note(f"{child.name} {how}; starting it again ({used + 1} of {allowed})")
        self.observed.bury(child)
        self.state.deaths.append(PeerDied(role, child.spec.index, child.incarnation))
        self._tell_peers(self.state.deaths[-1])
        replacement = spawn(child.spec, self.run, child.incarnation + 1)
        self.state.children[role, child.spec.index] = replacement

    def _tell_peers(self, death: PeerDied) -> None:
        """Broker, proxy and every learner rank hear of generators and environment servers that died."""
        for child in self.state.children.values():
            if child.spec.role in _TOLD and child.registered:
                self._send(child, death)

    def _catch_up(self, child: Child) -> None:
        """What a process that registers late has missed."""
        for death in self.state.deaths if child.spec.role in _TOLD else ():
            self._send(child, death)

    def _collect_reports(self) -> None:
        """Closing reports of a run that did not get to its end; after the first cause nothing else matters.

        Their senders have ended, but the last bytes may still be on their way to this socket.
        """
        assert self._socket is not None
        deadline = time.monotonic() + _LAST_WORDS_S
        while not {"broker", "learner"} <= self.state.reports.keys():
            if not self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
                return
            with contextlib.suppress(ProtocolError):
                _peer, message = receive_from(self._socket)
                if isinstance(message, Done):
                    self.state.reports.setdefault(message.role, message.report)

    def _send(self, child: Child, message: Message) -> None:
        assert self._socket is not None
        with contextlib.suppress(PeerGone, zmq.Again):
            send_to(self._socket, identity(child.spec.role, child.spec.index, child.incarnation), message)

    # ------------------------------------------------------------ end

    def _tear_down(self, reason: str, tracker_s: float) -> None:
        children = list(self.state.children.values())
        self.display.ending(reason)
        if self._socket is not None:
            for child in children:
                self._send(child, Stop(reason))
        for child in children:
            if not child.registered:  # it cannot hear a Stop yet
                child.kill()
        killed = end_all(children, self.config.timeouts.stop_s)
        if self._socket is not None:
            self._collect_reports()
        if killed:
            self.display.note(f"killed after {self.config.timeouts.stop_s:g} s: {', '.join(killed)}")
        if self._socket is not None:
            self._socket.close(linger=0)
        unlink_segments(self.run.run_id)
        shutil.rmtree(self.run.socket_folder, ignore_errors=True)
        (self.run.folder / "pid").unlink(missing_ok=True)
        if not self.tracker.close(tracker_s):
            self.display.note(f"the tracker did not finish within {tracker_s:g} s; metrics.jsonl has every row")
        end_descendants(spared=self._others)


def _interrupt(_number: int, _frame: object) -> None:
    raise Interrupted
