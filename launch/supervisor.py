"""The supervisor: starts every process of the plan, watches, restarts, tears down, reports.

It is the one fence of a run: a process is dead when the kernel says so here, and only then do its peers
hear `PeerDied`. A *killed* generator or environment server is started again (its work is issued again by
broker and proxy); a Python exception in any role, or the death of broker, proxy or learner, ends the run
with the first cause (`launch.run` goes on from a checkpoint after such a death). Every end - success,
failure, Ctrl-C - leaves no process, socket or shared memory.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator

import zmq

from launch.children import Child, adopt_orphans, descendants, end_all, end_descendants, log_tail, spawn
from launch.live import Display
from launch.plan import ProcessSpec
from launch.summary import Children, Observed, build_summary
from rl.core.messages import Done, Fatal, Heartbeat, Message, Metrics, PeerDied, ProtocolError, Register, Stop
from rl.core.run import RunFile
from rl.core.sockets import PeerGone, identity, open_socket, receive_from, send_to
from rl.core.tracking import Tracker
from rl.weights.shm_file import remove_slots

_REPLACEABLE = {"generator": "generator", "env_server": "env"}  # role -> section with max_restarts
_HEARS_OF_DEATHS = ("broker", "proxy", "learner")
_CLOSING_REPORTS = {"broker", "learner"}
_POLL_S = 0.05
_CLOSING_REPORTS_S = 2.0
_TRACKER_S = 30.0  # an online dashboard may still be sending
_TRACKER_HURRIED_S = 1.5  # after Ctrl-C or a failure: with timeouts.stop_s, all ends within 10 s


class RunFailed(RuntimeError):
    """The first cause, in one line; `detail` is a traceback, state dump or log tail."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class Supervisor:
    def __init__(self, run: RunFile, plan: list[ProcessSpec]) -> None:
        self.lost = False
        """Broker, proxy or learner was killed: the run may go on from a checkpoint."""
        self._run = run
        self._config = run.config
        self._plan = plan
        self._others = descendants()  # of whoever runs this in a process of theirs
        self._children: Children = {}
        self._restarts: Counter[str] = Counter()
        self._deaths: list[PeerDied] = []  # for whoever registers later
        self._reports: dict[str, bytes] = {}  # closing reports by role

        self._socket = open_socket(zmq.ROUTER, run, "control", bind=True)
        settings = run.config.model_dump(mode="json")
        self._tracker = Tracker(run.config.tracking, run.folder, run.config.name, settings)
        self._observed = Observed(run.started_at, run.start_step)
        self._display = Display(run, self._observed)

    def execute(self) -> int:
        """Run to the end. Returns the exit code: 0 success, 1 failure, 130 interrupted."""
        error: RunFailed | None = None
        interrupted = False
        adopt_orphans()
        stops = (signal.SIGINT, signal.SIGTERM)
        handlers = {number: signal.signal(number, signal.default_int_handler) for number in stops}

        try:
            for spec in self._plan:
                self._spawn(spec, 0)
            self._watch()

        except RunFailed as failure:
            error = failure
        except KeyboardInterrupt:
            interrupted = True

        finally:
            for number in handlers:  # a second Ctrl-C must not interrupt the clean-up
                signal.signal(number, signal.SIG_IGN)
            reason = "interrupted" if interrupted else str(error) if error else "finished"
            self._tear_down(reason, _TRACKER_S if reason == "finished" else _TRACKER_HURRIED_S)

        summary = build_summary(self._run, self._reports, self._observed, str(error or ""), self._children)
        (self._run.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        self._display.close(summary, error, interrupted)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return 130 if interrupted else 1 if error else 0

    # ------------------------------------------------------------ start and watch

    def _spawn(self, spec: ProcessSpec, incarnation: int) -> None:
        self._children[spec.role, spec.index] = spawn(spec, self._run, incarnation)

    def _watch(self) -> None:
        while not self._reports.keys() >= _CLOSING_REPORTS:
            self._drain(_POLL_S)
            self._check_children()
            self._display.refresh(self._children)

    def _drain(self, patience_s: float = 0.0) -> None:
        for message in self._messages(patience_s):
            self._handle(message)

    def _messages(self, patience_s: float) -> Iterator[Message]:
        """What has come and what comes within `patience_s`."""
        deadline = time.monotonic() + patience_s
        while self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            try:
                _peer, message = receive_from(self._socket)
            except ProtocolError as error:
                raise RunFailed(f"supervisor received a malformed control message: {error}") from None
            yield message

    def _handle(self, message: Message) -> None:
        match message:
            case Heartbeat():
                self._beat(message)
            case Register():
                if child := self._child(message):
                    child.registered = True
                    child.last_beat = time.monotonic()
                    self._tell_of_deaths(child, self._deaths)

            case Metrics():
                self._record(message)
            case Fatal():
                raise RunFailed(f"{message.role}.{message.index}: {message.message}", message.detail)
            case Done():
                self._reports[message.role] = message.report

    def _child(self, message: Heartbeat | Register) -> Child | None:
        """The sender, unless it has been replaced."""
        child = self._children.get((message.role, message.index))
        return child if child is not None and child.incarnation == message.incarnation else None

    def _beat(self, beat: Heartbeat) -> None:
        child = self._child(beat)
        if child is None:
            return

        child.last_beat = time.monotonic()
        if beat.progress != child.beat.progress or not beat.busy:
            child.progressed = child.last_beat
        child.beat = beat

    def _record(self, row: Metrics) -> None:
        values = dict(row.values)
        if "train/loss" in values:
            values |= self._observed.step_values(self._children)

        self._observed.add(row.step, values)
        self._tracker.log(row.step, values, row.histograms)
        self._display.row(row.step, values)

    # ------------------------------------------------------------ failures

    def _check_children(self) -> None:
        limits = self._config.timeouts
        now = time.monotonic()

        for child in list(self._children.values()):
            if child.popen.poll() is not None:
                self._drain()  # what it sent before its death may be the first cause
                self._child_ended(child)
            elif not child.registered:
                if now - child.started > limits.start_s:
                    late = f"{child.name} did not start within timeouts.start_s={limits.start_s:g} s"
                    raise RunFailed(late, log_tail(child.log))
            elif now - child.last_beat > limits.hang_s:
                child.kill(f"no heartbeat for {limits.hang_s:g} s")
            elif child.beat.busy and now - child.progressed > limits.hang_s:
                child.kill(f"busy without progress for {limits.hang_s:g} s")

    def _child_ended(self, child: Child) -> None:
        """Replace it, or raise RunFailed."""
        code = child.popen.returncode
        killed = code < 0 or bool(child.why_killed)
        how = child.why_killed or (f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")
        ended = f"{child.name} ended: {how}"
        role = child.spec.role
        self.lost = killed and role not in _REPLACEABLE
        if not killed or self.lost:
            raise RunFailed(ended, log_tail(child.log))

        used = self._restarts[child.name]
        allowed = getattr(self._config, _REPLACEABLE[role]).max_restarts
        if used >= allowed:
            raise RunFailed(f"{ended}; it was restarted {used} times already", log_tail(child.log))
        self._restarts[child.name] += 1
        child.kill()  # what is left of its process group
        self._display.note(f"{child.name} {how}; starting it again ({used + 1} of {allowed})")
        self._observed.child_died(child)

        death = PeerDied(role, child.spec.index, child.incarnation)
        self._deaths.append(death)
        for peer in self._children.values():
            if peer.registered:
                self._tell_of_deaths(peer, [death])
        self._spawn(child.spec, child.incarnation + 1)

    def _tell_of_deaths(self, peer: Child, deaths: list[PeerDied]) -> None:
        """Broker, proxy and every learner rank hear of generators and environment servers that died."""
        for death in deaths if peer.spec.role in _HEARS_OF_DEATHS else ():
            self._send(peer, death)

    def _collect_reports(self) -> None:
        """Closing reports of a run that did not get to its end; after the first cause nothing else matters.

        Their senders have ended, but the last bytes may still be on their way to this socket.
        """
        if self._reports.keys() >= _CLOSING_REPORTS:
            return
        with contextlib.suppress(RunFailed):
            for message in self._messages(_CLOSING_REPORTS_S):
                if isinstance(message, Done):
                    self._reports.setdefault(message.role, message.report)
                    if self._reports.keys() >= _CLOSING_REPORTS:
                        return

    def _send(self, child: Child, message: Message) -> None:
        with contextlib.suppress(PeerGone, zmq.Again):
            send_to(self._socket, identity(child.spec.role, child.spec.index, child.incarnation), message)

    # ------------------------------------------------------------ end

    def _tear_down(self, reason: str, tracker_s: float) -> None:
        self._display.ending(reason)
        children = list(self._children.values())
        for child in children:
            self._send(child, Stop(reason))
            if not child.registered:  # it cannot hear a Stop yet
                child.kill()

        stop_s = self._config.timeouts.stop_s
        if killed := end_all(children, stop_s):
            self._display.note(f"killed after {stop_s:g} s: {', '.join(killed)}")
        self._collect_reports()
        self._socket.close(linger=0)

        remove_slots(self._run.run_id)
        shutil.rmtree(self._run.socket_folder, ignore_errors=True)
        (self._run.folder / "pid").unlink(missing_ok=True)
        if not self._tracker.close(tracker_s):
            self._display.note(f"the tracker did not finish within {tracker_s:g} s; metrics.jsonl has every row")
        end_descendants(spared=self._others)
