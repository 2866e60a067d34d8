"""The broker process: BrokerCore behind its sockets (`python -m rollout.broker.process --run DIR`).

It has one poll loop. Each turn drains every socket, turns messages into events of the core, writes these to the log,
and carries out its actions. Then it sends each server its tickets, in one message that also acknowledges what was
taken. Payloads stay where they were received: the core passes them through, and a batch concatenates them once.

What peers send is not trusted: what is no message, or not its sender's to say, is counted and dropped; a trajectory
that cannot be true fails its ticket. A peer that is gone is the supervisor's to announce; until then its tickets stay
open.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from itertools import groupby

import msgspec
import zmq

from rl.config.damage import RESUME, reading
from rl.config.failures import EndsRun
from rl.observe.intervals import success_rates
from rl.observe.trace import told_since
from rl.store.batch_files import drop_unneeded, read_batch_part, write_batch_part
from rl.store.checkpoint_folder import read_journal, steps_of
from rl.wire import messages
from rl.wire.awake import Awake
from rl.wire.messages import Message, ProtocolError, Version, in_frames
from rl.wire.process import Process, WaitExpired, leave
from rl.wire.receiving import Malformed, Receiver
from rl.wire.run import context_from_command_line
from rl.wire.sockets import PeerGone, open_socket, secret, send, send_all, send_to
from rollout.broker import actions
from rollout.broker.assembly import info_means, make_batch_parts, no_batch
from rollout.broker.core import BrokerCore
from rollout.broker.deadlines import Patience
from rollout.broker.guards import BatchGuards
from rollout.broker.intake import Intake, ProxyMessage, ServerMessage
from rollout.broker.kept import keep, restore
from rollout.broker.ledger import Ledger, TracedLedger
from rollout.broker.rules import Rules
from rollout.broker.statistics import labelled_metrics, rate_columns
from rollout.broker.validation import check_report, check_wish, vocabulary_of
from rollout.broker.write_ahead import WriteAheadLog

_LOG = "broker.log"
_M_TRIM_THRESHOLD = -1  # malloc.h
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_COLLECT_AFTER = 100_000  # net allocations


class RunStopped(EndsRun, RuntimeError):
    """The core says that the run cannot go on."""


class Broker:
    """Call `run()` once, inside the process's `with` block."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.config = process.config
        run = process.run
        rules = Rules.of(self.config, run.train_tasks, run.start_step)
        self.guards = BatchGuards(rules, process.alarms)
        ledger = TracedLedger() if self.config.tracking.trace == "full" else Ledger()
        self.intake = Intake(BrokerCore(rules, ledger=ledger, data=run.data), vocabulary_of(run))
        self._outgoing: list[tuple[int, int, Message]] = []  # to servers (index, incarnation), sent once per turn
        self._later: list[actions.Action | messages.BatchRequest] = []  # for the end of the turn
        self._evals = run.folder / "evals.jsonl"
        self.log = WriteAheadLog(run.folder / _LOG, secret(run, b"broker.log"))

        self.tickets = open_socket(zmq.ROUTER, run, "tickets", bind=True)
        self.trajectories = open_socket(zmq.ROUTER, run, "trajectories", bind=True)
        self.usage = open_socket(zmq.ROUTER, run, "usage", bind=True)
        self.steps = open_socket(zmq.ROUTER, run, "steps", bind=True)
        self.names = run.names
        me = self.names.of("broker", process.index, process.incarnation)
        self.batches = [
            open_socket(zmq.DEALER, run, "batches", rank, identity=me) for rank in range(self.config.learner.ranks)
        ]

        self._no_more = False  # batches: the learner is to be told
        self._learner = b""  # address of rank 0, known from its first message
        self._learner_incarnation = -1
        self._saves: list[messages.SaveRequest] = []  # of versions that are not published yet
        self._awake = Awake(time.monotonic(), self.process.tick_s)
        self._now = self._awake.read(time.monotonic())  # of this turn
        self._waiting_since = self._now  # the learner's earliest possible wait for batch n
        self._patience = Patience(self.config.learner.batch_deadline_s, self._now)
        self.counts = {"tickets": 0, "cancels": 0}
        self._malformed = Malformed("broker")
        process.closing_report = lambda: self.core.report()

        if self.log.exists():
            self._recover()
        elif self.config.resume is not None:
            state = msgspec.msgpack.decode(read_journal(self.config.resume))
            self.core.restore(state, new_data=self.config.resume_data == "new")
            self.guards.restored(self.core)
        self.log.begin(keep(self.intake))

    @property
    def core(self) -> BrokerCore:
        return self.intake.core

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        process = self.process
        # First tokens before results, results before deaths: as much as possible counts before it is tried again.
        handlers = {
            self.usage: self._from_proxy,
            self.trajectories: self._result,
            self.tickets: self._from_server,
            self.steps: self._from_learner,
        }
        again = {socket: partial(self._send_batch_parts_again, rank) for rank, socket in enumerate(self.batches)}
        receiver = Receiver(handlers, self._malformed, process.wake_fd, again=again)

        process.busy = True  # the loop turns even without messages: a frozen progress is a hang
        while not process.stopping:
            with process.waits.on("env_server" if self.core.batches.requested else "learner", self.core.n + 1):
                receiver.wait(self._wait_s())
            self._now = self._awake.read(time.monotonic())
            receiver.drain()
            for message in process.received():
                self._from_supervisor(message)
            if (deadline := self.core.next_deadline()) is not None and deadline <= self._now:
                self._take(None)

            self._settle()
            self._watch()
            process.progress += 1
            process.stats = self._stats()

        # The run has ended: nobody goes on from here.
        self._drop_batches(before=self.core.groups.e)
        self.log.remove()

    def close(self) -> None:
        for socket in (self.tickets, self.trajectories, self.usage, self.steps, *self.batches):
            socket.close()

    def _wait_s(self) -> float:
        deadline = self.core.next_deadline()
        tick_s = self.process.tick_s
        return tick_s if deadline is None else min(tick_s, max(0.0, deadline - self._awake.read(time.monotonic())))

    # ------------------------------------------------------------ messages to events

    def _from_proxy(self, message: Message, peer: bytes) -> None:
        self.names.sender(peer, "proxy")
        if not isinstance(message, ProxyMessage | messages.StillSampling):
            raise ProtocolError(f"{type(message).__name__} on the usage socket")
        newest = Version(self.core.timeline, self.core.groups.e)
        check_report(message, newest, self.config.generator.max_model_len)
        self._patience.advanced(self._now)
        if isinstance(message, ProxyMessage):
            self._take(message)

    def _result(self, message: Message, peer: bytes) -> None:
        """A trajectory, of a server that has said hello."""
        if not isinstance(message, messages.Trajectory):
            raise ProtocolError(f"{type(message).__name__} on the trajectories socket")
        key = (message.server, message.incarnation)
        if key != self.names.sender(peer, "env_server", self.config.env.servers):
            raise ProtocolError(f"Trajectory in the name of another than {peer!r}")
        if not self.intake.knows(*key):
            raise ProtocolError(f"Trajectory of an unknown environment server {key}")
        self.process.waits.ended()
        self._patience.advanced(self._now)
        self._take(message)

    def _from_server(self, message: Message, peer: bytes) -> None:
        if not isinstance(message, ServerMessage) or isinstance(message, messages.Trajectory):
            raise ProtocolError(f"{type(message).__name__} on the tickets socket")
        if (message.server, message.incarnation) != self.names.sender(peer, "env_server", self.config.env.servers):
            raise ProtocolError(f"{type(message).__name__} in the name of another than {peer!r}")
        self._take(message)

    def _from_learner(self, message: Message, peer: bytes) -> None:
        _, incarnation = self.names.sender(peer, "learner")
        if incarnation < self._learner_incarnation:
            raise ProtocolError(f"{type(message).__name__} of {peer!r}, which has been replaced")
        check_wish(message, self.core.n, self.core.groups.e, self.process.run.eval_tasks)

        self._learner_incarnation = incarnation
        self._learner = peer
        match message:
            case messages.SaveRequest(_, newest):
                # What stands on the learner's machine alone may be lost with it.
                if before := min(newest, max(steps_of(self.process.run.folder / "checkpoints"), default=0)):
                    self.core.history.forget(before)
                    self._drop_batches(before)
                self._saves.append(message)

            case messages.BatchRequest(step) if step < self.core.groups.e:
                self._later.append(message)
            case messages.BatchRequest() | messages.EvalRequest():
                self._take(message)
                beyond = isinstance(message, messages.BatchRequest) and message.step >= self.core.groups.run.steps
                self._no_more = self.intake.closed or beyond
            case messages.Published():
                self._waiting_since = self._now
                self._take(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} on the steps socket")

    def _from_supervisor(self, message: messages.SupervisorMessage) -> None:
        if isinstance(message, messages.StillCopying):
            self._patience.advanced(self._now)
        elif isinstance(message, messages.PeerDied):
            # Who begins late hears of earlier deaths too, maybe after the successor has asked.
            if message.role == "learner" and message.incarnation >= self._learner_incarnation:
                self._saves.clear()
            self._take(message)
        elif message.save_first:
            self._take(message)
            self._no_more = True

    def _take(self, message: Message | None) -> None:
        """An event; None: a deadline has passed."""
        self.log.append(self._now, message)
        self._carry_out(self.intake.take(message, self._now))

    def _recover(self) -> None:
        """What an earlier incarnation knew. Servers say hello and the learner asks again for what it did not send."""
        with reading(self.process.run.folder / _LOG, RESUME):
            kept, events = self.log.read()
            restore(self.intake, kept)

        since: float | None = None  # of the first event
        for now, message in events:
            since = now if since is None else since
            with contextlib.suppress(ProtocolError):  # it was dropped the first time as well
                self._carry_out(self.intake.take(message, now))

        self._outgoing.clear()
        self.intake.acks.clear()
        self.intake.refused.clear()
        self.intake.rewards.clear()
        if since is not None:
            traced = told_since(self.process.run.folder, "broker", since)
            self.process.trace.add(*(event for event in self.core.ledger.take_events() if event not in traced))

        evals = self._evals.read_bytes().split(b"\n")[:-1] if self._evals.exists() else []
        with reading(self._evals, RESUME):
            told = {json.loads(row)["version"] for row in evals}
        self._later = [action for action in self._later if not self._was_told(action, told)]
        self._carry_out_later()

    def _was_told(self, action: actions.Action | messages.BatchRequest, evaluated: set[int]) -> bool:
        """evaluated: versions whose episodes stand in the file."""
        match action:
            case actions.EvalReport():
                return action.version.n in evaluated
            case actions.EmitBatch():
                return action.step < self.core.n
        return False

    def _save(self) -> None:
        """Answer the requests for this version's journal; those for a later one wait for its publication."""
        n = self.core.n
        for request in [each for each in self._saves if each.version.n <= n]:
            if request.version.n < n:
                raise RunStopped(f"the learner asks for the journal of version {request.version.n} at version {n}")
            self._saves.remove(request)
            state = msgspec.msgpack.encode(self.core.snapshot())
            with contextlib.suppress(PeerGone):  # it died: the next one asks again
                send_to(self.steps, self._learner, messages.Journal(request.version, state))

    def _send_again(self, step: int, ranks: Iterable[int]) -> None:
        """Send a batch again to a learner that trains those since its checkpoint again; it drops what it does not
        await."""
        together = self.config.learner.context_parallel
        for team, members in groupby(ranks, lambda rank: rank // together):
            batch_part = read_batch_part(self.process.run.folder, step, team * together)
            for rank in members:
                send(self.batches[rank], in_frames(msgspec.structs.replace(batch_part, rank=rank)))
            self.process.progress += 1  # as when it was written

    def _send_batch_parts_again(self, rank: int) -> None:
        """The connection to this rank broke: what it has not trained yet may be lost."""
        for step in range(self.core.n, self.core.groups.e):
            with contextlib.suppress(FileNotFoundError):  # assembled in this turn, not written yet
                self._send_again(step, [rank])

    def _drop_batches(self, before: int) -> None:
        drop_unneeded(self.process.run.folder, before, self.config.tracking.replay)

    # ------------------------------------------------------------ actions to messages

    def _carry_out(self, wanted: list[actions.Action]) -> None:
        """What is sent goes out at the end of the turn, once the log has the events that led to it."""
        for action in wanted:
            match action:
                case actions.IssueTicket(server, ticket):
                    self.counts["tickets"] += 1
                    self._tell(server, ticket)
                case actions.RevokeTickets(server, ticket_ids):
                    self.counts["cancels"] += len(ticket_ids)
                    self._tell(server, messages.CancelTickets(ticket_ids))
                case actions.StopRun(reason):
                    raise RunStopped(reason)
                case _:
                    self._later.append(action)

    def _settle(self) -> None:
        """The end of a turn."""
        self.log.flush()
        # Only what the log has: nothing else may be told twice, by this incarnation and by the next.
        self.process.trace.add(*self.core.ledger.take_events())
        self._carry_out_later()
        for rank, socket in enumerate(self.batches) if self._no_more else ():
            send(socket, no_batch(self.core.groups.e, self.core.groups.run.steps, self.core.timeline, rank))
        self._no_more = False
        for refused in self.intake.refused:
            self._malformed(ProtocolError(refused))
        self.intake.refused.clear()
        self.guards.rewarded(self.intake.rewards)
        self.intake.rewards.clear()

        self._save()
        self._send_to_servers()
        if self.log.is_long:
            self.log.begin(keep(self.intake))

    def _carry_out_later(self) -> None:
        later = self._later
        self._later = []

        for action in later:
            match action:
                case messages.BatchRequest(step):
                    self._send_again(step, range(len(self.batches)))
                case actions.EmitBatch():
                    self.guards.batch(action, self.core.stats)
                    together = self.config.learner.context_parallel
                    batch_parts = make_batch_parts(action, self.core.timeline, len(self.batches), together)

                    for socket, batch_part in zip(self.batches, batch_parts, strict=True):
                        if batch_part.rank % together == 0:  # the others of its team have the same
                            write_batch_part(self.process.run.folder, batch_part)
                            self.process.progress += 1  # gigabytes, of router replay, on a disk that may be slow
                        send(socket, in_frames(batch_part))

                case actions.GroupRecord():
                    self.guards.ended(action)
                case actions.EvalReport():
                    self.guards.evaluated(action)
                    self._keep_episodes(action)
                    self.process.send(messages.Metrics(action.version.n, eval_metrics(action)))
                case actions.Finished():
                    self.process.send_closing_report()

    def _keep_episodes(self, report: actions.EvalReport) -> None:
        """Keep one line per evaluated episode, in the order of the tasks."""
        rows = [{"version": report.version.n, **msgspec.structs.asdict(episode)} for episode in report.episodes]
        with self._evals.open("ab") as file:
            file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    def _tell(self, index: int, message: Message) -> None:
        server = self.core.servers.by_index.get(index)
        if server is not None:
            self._outgoing.append((index, server.incarnation, message))

    def _send_to_servers(self) -> None:
        """All at once: the socket's thread is woken once, and writes many messages in one call."""
        for (index, incarnation), ticket_ids in self.intake.acks.items():
            self._outgoing.append((index, incarnation, messages.AckTickets(ticket_ids)))
        to_each: defaultdict[bytes, list[Message]] = defaultdict(list)
        for index, incarnation, message in self._outgoing:
            to_each[self.names.of("env_server", index, incarnation)].append(message)
        for server, together in to_each.items():
            with contextlib.suppress(PeerGone):  # it died: its PeerDied gives back what it held
                send_all(self.tickets, together, server)
        self.intake.acks.clear()
        self._outgoing.clear()

    # ------------------------------------------------------------ waiting

    def _watch(self) -> None:
        """The learner waits for batch n from the publication of n, if it has asked. Raises WaitExpired."""
        core = self.core
        asked = core.batches.requested.get(core.n)
        if asked is None:
            return
        if self._patience.must_be_told(self._now):
            for socket in self.batches:
                send(socket, messages.BatchUnderway(core.n))
        if not self._patience.has_run_out(max(asked, self._waiting_since), self._now):
            return

        error = WaitExpired(
            f"learner.0 waited for the broker's batch {core.n}, and for {self._patience.deadline_s:g} s no answer "
            "began, grew or ended, no episode, and no copied file (learner.batch_deadline_s); the broker waits for "
            f"{self.intake.awaited()}"
        )
        error.add_note(json.dumps(core.describe(), indent=2))
        raise error

    def _stats(self) -> dict[str, float]:
        samples = self.core.ledger.report()["samples"]
        queue = {f"queue_{state}": float(samples[state]) for state in ("queued", "running", "waiting", "batched")}
        others = {
            "trajectories": self.intake.trajectories,
            "outstanding": self.core.servers.outstanding,
            "malformed": self._malformed.count,
        }
        return queue | self.counts | others


def eval_metrics(report: actions.EvalReport) -> dict[str, float]:
    versions = list(report.versions) or [-1]
    values = {name: getattr(report, name) for name in ("reward", "accuracy", "length", "failed", "seconds")}
    values |= {"version_min": min(versions), "version_max": max(versions)}
    values |= info_means(episode.info for episode in report.episodes)
    every = {f"eval/{name}": float(value) for name, value in values.items()}
    every |= rate_columns("eval/", report.rates) | labelled_metrics("eval", report.episodes)

    for label in {episode.label for episode in report.episodes} - {""}:
        own = [(episode.task_index, episode.success) for episode in report.episodes if episode.label == label]
        every |= rate_columns(f"eval/{label}/", success_rates(own))
    return every


def tune_memory() -> None:
    """Tune the allocator for a process where tens of megabytes of received arrays come and go every second.

    Call once everything is imported, before any socket exists (whose thread would get a heap of its own).

    * malloc keeps what is freed (glibc; elsewhere nothing happens). By default it gives large blocks back to the
      kernel, and every trajectory touches fresh pages: measured, 25 page faults each.
    * The garbage collector runs every 100 000 allocations instead of every 700, and never walks what was imported:
      measured, up to a third of the core's time. Results do not wait for it: they are in no reference cycle.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the highest that it accepts
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        mallopt(_M_TOP_PAD, 16 << 20)
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def main() -> None:
    tune_memory()
    with Process("broker", context_from_command_line()) as process, contextlib.closing(Broker(process)) as broker:
        broker.run()
    leave()


if __name__ == "__main__":
    main()
