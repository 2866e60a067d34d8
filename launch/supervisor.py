"""The supervisor: starts every process of the plan, watches, restarts, tears down, reports.

It is the one fence of a run: a process is dead when its handle says so (`launch/launcher`), and only then do its peers
hear `PeerDied`. What died is started again in its place, and all others go on. A Python exception is a death as well,
unless the process had done nothing before, or it is one that would come again (`rl/config/failures.py`). Such an
exception ends the run with the first cause. Every end - success, failure, Ctrl-C - leaves no process, socket or shared
memory.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from pkgutil import resolve_name

import zmq

from launch.children import Child, Exits, adopt, end_all, log_tail, spawn, wait_all
from launch.dashboard import open_dashboard
from launch.heard import check_said
from launch.launcher import LAUNCHERS
from launch.launcher.address_book import AddressBook, Told
from launch.launcher.local import LocalLauncher
from launch.launcher.protocol import Found, Launcher
from launch.live import Display
from launch.plan import ProcessSpec
from launch.sittings import read_rows
from launch.summary import Children, Observed, build_summary, reserve_summary, write_summary
from rl.config.failures import ENDS_RUN
from rl.config.plugins import told
from rl.observe.alarms import Clock, RaisedAlarm, keep_alarm, limit, line, read_alarms
from rl.observe.trace import Trace
from rl.observe.trace_events import AlarmShown, ProcessDied, ProcessStarted, RunEnded
from rl.observe.tracking import Tracker
from rl.weights.host import clean_up
from rl.wire import messages
from rl.wire.awake import Awake
from rl.wire.messages import Message, ProtocolError
from rl.wire.receiving import Malformed, Receiver
from rl.wire.run import RunFile
from rl.wire.sockets import PeerGone, open_socket, send_to

FINISHED = "finished"
_WORKERS = ("generator", "env_server", "parsers", "teacher")
_TOGETHER = "learner"  # its ranks train as one, and are replaced as one
_SAME_DEATH_S = 2.0  # a rank's exception comes this long before the notice of the kill that led to it, at most
_FENCE_S = 60.0  # for the kernel to end a killed process, which may first give up 200 GB of locked pages
_CLOSING_REPORTS = {"broker", "learner"}  # of rows there is no broker
_POLL_S = 0.25
_HOUR_S = 3600.0
_CLOSING_REPORTS_S = 2.0
_TRACKER_S = 30.0  # an online dashboard may still be sending
_TRACKER_HURRIED_S = 1.5  # after Ctrl-C or a failure: with timeouts.stop_s, all ends within 10 s


class RunFailed(RuntimeError):
    """The first cause, in one line; `detail` is a traceback, state dump or log tail."""

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class Supervisor:
    def __init__(self, run: RunFile, plan: list[ProcessSpec], launcher: Launcher | None = None) -> None:
        self._run = run
        self._config = run.config
        self._plan = plan
        self._launcher = launcher or LocalLauncher(run)
        self._found: dict[str, Found] = getattr(self._launcher, "found", {})
        self._children: Children = {}

        self._ended = False  # some process has, and was not looked at yet
        self._look_at = 0.0  # when all are looked at, by the monotonic clock

        self._deaths: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        """Of each process, those that count: when, and the step that had been trained."""
        self._book = AddressBook()
        self._reports: dict[str, bytes] = {}  # closing reports by role
        self._reporters = {"learner"} if run.config.supervised else _CLOSING_REPORTS
        self._ending = False
        self._save_until: float | None = None  # since the first Ctrl-C
        self._saver: Child | None = None  # the process that was told of it

        run.make_names()
        self._socket = open_socket(zmq.ROUTER, run, "control", bind=True)
        self._exits = Exits()
        self._receiver = Receiver({self._socket: self._handle}, Malformed("supervisor"), self._exits.fileno())
        self._tracker = Tracker(run.folder, open_dashboard(run))

        self._observed = Observed(run.started_at, run.start_step)
        if self._found:
            self._observed.take_over(list(read_rows(run.folder)), read_alarms(run.folder), time.time())
        else:
            self._observed.go_on(read_rows(run.folder))

        self._display = Display(run, self._observed)
        self._trace = Trace(run.folder, "supervisor", 0, 0, run.config.tracking.trace)
        self._clock = Clock(time.time(), time.monotonic())
        self._awake = Awake(time.monotonic(), _POLL_S)

    def execute(self) -> int:
        """Run to the end. Returns the exit code: 0 success, 1 failure, 130 interrupted."""
        error: RunFailed | None = None
        interrupted = False
        stops = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
            stops.append(signal.SIGHUP)
        handlers = {number: signal.signal(number, self._interrupt) for number in stops}

        try:
            reserve_summary(self._run.folder / "summary.json")
            # Those that take seconds to import come last: a launcher may still have it done for them.
            for spec in sorted(self._plan, key=lambda each: bool(each.imports)):
                if (found := self._found.get(spec.name)) is not None:
                    self._adopt(spec, found)
                else:
                    self._spawn(spec, 0)
            self._watch()

        except RunFailed as failure:
            error = failure
        except KeyboardInterrupt:
            interrupted = True
        except OSError as failure:  # a full disk, for instance; what was open already has no name in it
            error = RunFailed(f"the supervisor cannot write to {self._run.folder}: {failure}")
        except SystemExit:  # rich's answer to a broken pipe
            error = RunFailed("standard output was closed")
        except Exception as failure:  # a fault of ours ends a run with its books, as any other cause
            error = RunFailed(f"the supervisor failed: {failure!r}", traceback.format_exc())

        finally:
            for number in handlers:  # a second Ctrl-C must not interrupt the clean-up
                signal.signal(number, signal.SIG_IGN)
            reason = "interrupted" if interrupted else str(error) if error else FINISHED
            self._tear_down(reason)

        summary = build_summary(self._run, self._reports, self._observed, str(error or ""), self._children)
        summary["dashboard"] = self._tracker.dashboard.describe()
        try:
            write_summary(self._run.folder / "summary.json", summary)
        except OSError as failure:
            error = error or RunFailed(f"summary.json: {failure}")

        self._close_tracker(hurried=bool(error) or interrupted)
        self._launcher.close()
        self._display.close(summary, error, interrupted)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return 130 if interrupted else 1 if error else 0

    def _interrupt(self, number: int, _frame: object) -> None:
        if number == signal.SIGHUP and sys.stdout.isatty():  # the terminal is gone
            self._display.mute()
        trained = self._observed.step > self._run.start_step
        if self._save_until is not None or not trained:
            raise KeyboardInterrupt
        self._save_until = self._latest_end()

    def _now(self) -> float:
        """The time by which children are judged: a supervisor that was stopped has heard of nobody."""
        return self._awake.read(time.monotonic())

    # ------------------------------------------------------------ start and watch

    def _spawn(self, spec: ProcessSpec, incarnation: int) -> None:
        try:
            child = spawn(spec, self._run, incarnation, self._launcher, self._now())
        except Exception as error:
            name = self._config.launcher
            if name in LAUNCHERS:  # a full disk or a fault of ours, which `execute` tells apart
                raise
            raise RunFailed(f"launcher={name!r} could not start {spec.name}: {told(error)}") from error
        self._children[spec.role, spec.index] = child
        self._exits.watch(child.handle)
        self._trace.add(ProcessStarted(spec.role, spec.index, incarnation))

    def _adopt(self, spec: ProcessSpec, found: Found) -> None:
        """A process that another supervisor began. If it has ended, it is replaced as any other. Whoever registers
        anew hears of all deaths before, some of which may have been told to nobody."""
        child = self._children[spec.role, spec.index] = adopt(spec, self._run, found, self._now())
        self._exits.watch(child.handle)
        names = self._run.names
        earlier = [messages.PeerDied(spec.role, spec.index, number) for number in range(found.incarnation)]
        self._book.died({names.of(each.role, each.index, each.incarnation): each for each in earlier})

    def _watch(self) -> None:
        while not all(map(self._has_finished, self._reporters)):
            self._drain(_POLL_S)
            if self._ended or time.monotonic() >= self._look_at:  # not at each of a thousand heartbeats
                self._ended = False
                self._look_at = time.monotonic() + _POLL_S
                self._check_children()
            jump_s = self._clock.jump_s(time.time(), time.monotonic())
            if jump_s > limit(self._config.alarms, "clock", "s"):
                self._raise_alarm("supervisor", "clock", f"a jump of {jump_s:.0f} s")

            self._display.refresh(self._children)
            if self._save_until is not None:
                self._await_checkpoint(self._save_until)

    def _await_checkpoint(self, until: float) -> None:
        """Raises KeyboardInterrupt once the learner has saved what it had, or its time is over. It may train a step
        before that, in which a hang is found as always.
        """
        saver = self._children["broker" if "broker" in self._reporters else "learner", 0]
        if self._saver is not saver and saver.registered:
            self._saver = saver
            self._send(saver.identity, messages.Stop("interrupted", save_first=True))
            self._display.note("a checkpoint of the step that is being trained is saved; Ctrl-C again ends at once")

        if self._has_finished("learner"):  # whatever its last heartbeat said before
            raise KeyboardInterrupt
        if self._children["learner", 0].beat.busy:
            self._save_until = self._latest_end()
        elif self._now() > until:
            raise KeyboardInterrupt

    def _latest_end(self) -> float:
        """Of a learner that is to save now."""
        return self._now() + self._config.timeouts.hang_s + self._run.save_s

    def _has_finished(self, role: str) -> bool:
        """Whether it has said its last word, and not because of an exception: then its successor will."""
        return role in self._reports and self._children[role, 0].last_words is None

    def _drain(self, patience_s: float = 0.0) -> None:
        """What has come, and what comes first within `patience_s`."""
        self._receiver.wait(patience_s)
        self._ended |= self._exits.clear()
        self._receiver.drain()

    def _handle(self, message: Message, peer: bytes) -> None:
        """The sender is known by its identity, never by what its message says."""
        child = self._child(peer)
        check_said(message, child.spec, child.incarnation)
        if isinstance(message, messages.Spoken):
            if message.seq in child.heard:
                return
            child.heard.add(message.seq)

        if self._ending and not isinstance(message, messages.Done):
            return
        match message:
            case messages.Heartbeat():
                self._beat(child, message)
            case messages.Register():
                child.registered = True
                child.last_beat = self._now()
                self._tell(self._book.register(peer, message))

            case messages.Metrics():
                self._record(message)
            case messages.AlarmRaised():
                self._raise_alarm(message.who, message.name, message.detail)
            case messages.Fatal():
                self._gave_up(child, message)
            case messages.Done():
                self._reports[child.spec.role] = message.report
            case _:
                raise ProtocolError(f"{type(message).__name__} on the control socket")

    def _child(self, peer: bytes) -> Child:
        """Raises ProtocolError for a stranger, and for a process that has been replaced."""
        match peer.split(b"."):
            case [role, index, *_] if index.isdigit():
                child = self._children.get((role.decode(errors="replace"), int(index)))
                if child is not None and child.identity == peer:
                    return child
        raise ProtocolError(f"stranger {peer!r} on the control socket")

    def _beat(self, child: Child, beat: messages.Heartbeat) -> None:
        child.last_beat = self._now()
        if beat.progress != child.beat.progress or not beat.busy:
            child.progressed = child.last_beat
        child.beat = beat
        self._observed.waited(child.name, beat.longest)

    def _raise_alarm(self, who: str, name: str, detail: str) -> None:
        """Shown once, whoever raises it first; counted as often as that process raises it."""
        if name in self._config.alarms.off:
            return

        step = self._observed.step
        known = self._observed.alarms.get(name)
        if known is not None:
            if known.who == who:
                keep_alarm(self._run.folder, known.again(step))
            return

        alarm = self._observed.alarms[name] = RaisedAlarm.of(name, step, who, detail)
        keep_alarm(self._run.folder, alarm)
        self._tracker.alert(name, line(name, f"{alarm.when}, {who}: {detail}"))
        self._display.note(line(name, f"{who}: {detail}"))
        self._trace.add(AlarmShown(name, f"{who}: {detail}"))

    def _record(self, row: messages.Metrics) -> None:
        values = dict(row.values)
        if "train/loss" in values:
            if not self._observed.is_news(row.step, values):
                return
            values |= self._observed.step_values(self._children)

        self._observed.add(row.step, values)
        self._tracker.log(row.step, values, row.histograms)
        self._display.row(row.step, values)
        self._tell_of_dashboard()

    def _tell_of_dashboard(self) -> None:
        """Now, not in a file at the end: a run may take days, and was to be watched."""
        if failure := self._tracker.failure():
            self._display.note(f"section tracking: a dashboard does not work ({failure}); metrics.jsonl has every row")

    # ------------------------------------------------------------ failures

    def _check_children(self) -> None:
        limits = self._config.timeouts
        now = self._now()
        for child in list(self._children.values()):
            if child is not self._children[child.spec.role, child.spec.index]:
                continue  # replaced meanwhile, with another rank

            if child.handle.poll() is not None:
                self._drain()  # what it sent before its death may be the first cause
                while child.says_more(self._now() - now):
                    self._drain(_POLL_S)

                self._child_ended(child)
            elif not child.registered:
                if child.comes_nearer(now):
                    self._tell_broker(messages.StillCopying())
                elif now - child.started > limits.start_s:
                    child.kill(f"did not start within timeouts.start_s={limits.start_s:g} s")
                    if child.incarnation == 0 and not child.found:  # nobody like it has worked yet: it would come again
                        raise RunFailed(f"{child.name} {child.why_killed}", log_tail(child.log))
            elif now - child.last_beat > limits.hang_s:
                child.kill(f"no heartbeat for {limits.hang_s:g} s")
            elif child.beat.busy and now - child.progressed > limits.hang_s:
                child.kill(f"busy without progress for {limits.hang_s:g} s")

    def _gave_up(self, child: Child, message: messages.Fatal) -> None:
        """An exception. It ends the run if it would come again (`ends_run`), or if the process had done nothing before.
        Any other one is a death, and so is a worker's, and a rank's that follows from the death of another rank: the
        process ends by itself.
        """
        child.last_words = message
        worked = child.incarnation > 0 or child.found or child.beat.progress > 0
        stays = message.ends_run and child.spec.role not in _WORKERS
        if (stays or not worked) and not self._rank_killed_beside(child):
            raise RunFailed(f"{child.name}: {message.message}", message.detail)

    def _rank_killed_beside(self, child: Child) -> bool:
        """Whether another rank ended without an exception of its own; the kernel may be about to say so."""
        others = [each for each in self._unit(child) if each is not child and each.last_words is None]
        wait_all(others, _SAME_DEATH_S)
        return any(other.why_killed or other.handle.poll() not in (None, 0, 1) for other in others)

    def _unit(self, child: Child) -> list[Child]:
        """What is replaced when this process has died."""
        if child.spec.role != _TOGETHER:
            return [child]
        return [each for each in self._children.values() if each.spec.role == _TOGETHER]

    def _child_ended(self, child: Child) -> None:
        """Replace it, or raise RunFailed."""
        how, detail = child.how_it_ended()
        if child.handle.poll() == ENDS_RUN:
            raise RunFailed(f"{child.name}: {log_tail(child.log, 1)}")
        ended = f"{child.name} ended: {how}"
        self._trace_death(child, how)

        unit = self._unit(child)
        used = self._forget_deaths(unit[0].name)
        allowed = self._config.max_restarts
        if not child.moved:
            if used >= allowed:
                raise RunFailed(f"{ended}; it was restarted {used} times already", detail)
            self._deaths[unit[0].name].append((self._now(), self._observed.step))
        self._raise_alarm("supervisor", "process-died", f"{child.name} {how}; it is started again")
        count = "" if child.moved else f" ({used + 1} of {allowed})"
        self._display.note(f"{child.name} {how}; starting it again{count}")
        if child.last_words is not None:
            self._display.note(detail)

        for other in unit:
            if other is not child:
                self._trace_death(other, f"replaced together with {child.name}")
        self._replace(unit)

    def _forget_deaths(self, name: str) -> int:
        """How many deaths of a process count: those of the last hour, and whatever came before without that the run has
        come further since. A run of weeks outlives a fault a day, and not one that always comes at the same step.
        """
        now = self._now()
        step = self._observed.step
        counted = [(when, then) for when, then in self._deaths[name] if now - when < _HOUR_S or step <= then]
        self._deaths[name] = counted
        return len(counted)

    def _trace_death(self, child: Child, how: str) -> None:
        self._trace.add(ProcessDied(child.spec.role, child.spec.index, child.incarnation, how))

    def _replace(self, unit: list[Child]) -> None:
        """Fence these processes, tell everyone, and start their next incarnations."""
        self._reports.pop(unit[0].spec.role, None)  # its last word is that of its successor
        for child in unit:
            child.kill()  # also what is left of its process group
            self._observed.child_died(child)
        if alive := wait_all(unit, _FENCE_S + self._config.cluster.fence_s):
            raise RunFailed(f"{unit[0].name} cannot be replaced: {alive[0].name} survives SIGKILL")

        deaths = {each.identity: messages.PeerDied(each.spec.role, each.spec.index, each.incarnation) for each in unit}
        self._tell(self._book.died(deaths))
        for child in unit:
            self._spawn(child.spec, child.incarnation + 1)

    def _tell_broker(self, message: Message) -> None:
        """A run without rollout has none."""
        if broker := self._children.get(("broker", 0)):
            self._send(broker.identity, message)

    def _tell(self, told: Told) -> None:
        for peer, message in told:
            self._send(peer, message)

    def _collect_reports(self) -> None:
        """Closing reports of a run that did not get to its end; after the first cause nothing else matters.

        Their senders have ended, but the last bytes may still be on their way to this socket.
        """
        deadline = time.monotonic() + _CLOSING_REPORTS_S
        while not self._reports.keys() >= self._reporters and time.monotonic() < deadline:
            self._drain(_POLL_S)

    def _send(self, peer: bytes, message: Message) -> None:
        with contextlib.suppress(PeerGone, zmq.Again):
            send_to(self._socket, peer, message)

    # ------------------------------------------------------------ end

    def _tear_down(self, reason: str) -> None:
        self._ending = True
        self._trace.add(RunEnded(reason))
        self._display.ending(reason)
        children = list(self._children.values())
        for child in children:
            self._send(child.identity, messages.Stop(reason))
            if not child.registered:  # it cannot hear a Stop yet
                child.kill()

        # Nobody is in a hurry at the end of a run that trained all it should: there it hangs by the measure of before.
        limits = self._config.timeouts
        stop_s = max(limits.stop_s, limits.hang_s) if reason == FINISHED else limits.stop_s
        if killed := end_all(children, stop_s):
            self._display.note(f"killed after {stop_s:g} s: {', '.join(killed)}")
        self._collect_reports()
        self._socket.close(linger=0)
        self._exits.close()

        clean_up(self._run.run_id)
        shutil.rmtree(self._run.socket_folder, ignore_errors=True)

    def _close_tracker(self, *, hurried: bool) -> None:
        """The dashboard gets the run's report, where there is time for it."""

        def report() -> Path:
            write_report = resolve_name("launch.report.page:write_report")  # only now, as the command line does
            written: Path = write_report([self._run.folder])
            return written

        deadline_s = _TRACKER_HURRIED_S if hurried else _TRACKER_S
        if not self._tracker.close(deadline_s, None if hurried else report):
            self._display.note(f"the tracker did not finish within {deadline_s:g} s; metrics.jsonl has every row")
        self._tell_of_dashboard()
