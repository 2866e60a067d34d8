"""The broker process: BrokerCore behind its sockets (`python -m rollout.broker.process --run DIR`).

One poll loop. Each turn drains every socket, turns messages into events of the core, carries out its actions,
and then sends the servers their tickets, with one message each that acknowledges what was taken. Payloads stay where
they were received: the core passes them through, and a batch concatenates them once.

What peers send is not trusted: a frame that is no message is counted and dropped, a trajectory that contradicts
itself fails its ticket. A peer that is gone is the supervisor's to announce; until then its tickets stay open.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict

import msgspec
import zmq

from rl.core import messages
from rl.core.checkpoint_folder import read_journal
from rl.core.messages import Message, ProtocolError
from rl.core.process import Process, WaitExpired
from rl.core.receiving import Malformed, Receiver
from rl.core.run import context_from_command_line
from rl.core.sockets import PeerGone, identity, open_socket, send, send_to
from rollout.broker import actions
from rollout.broker.assembly import fault, make_shards, outcome_of
from rollout.broker.core import BrokerCore
from rollout.broker.memory import tune_memory
from rollout.broker.reorder import Reorder
from rollout.broker.rules import Rules

POLL_S = 0.1

ServerMessage = messages.Trajectory | messages.TicketFailed | messages.TicketCancelled | messages.ServerHello


class RunStopped(RuntimeError):
    """The core says that the run cannot go on."""


class Broker:
    """Call `run()` once, inside the process's `with` block."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.config = process.config
        run = process.run
        self.core = BrokerCore(Rules.of(self.config, run.train_tasks, run.start_step))
        process.closing_report = self.core.report
        if self.config.resume is not None:
            self.core.restore(msgspec.msgpack.decode(read_journal(self.config.resume)))

        self.tickets = open_socket(zmq.ROUTER, run, "tickets", bind=True)
        self.trajectories = open_socket(zmq.PULL, run, "trajectories", bind=True)
        self.usage = open_socket(zmq.PULL, run, "usage", bind=True)
        self.steps = open_socket(zmq.ROUTER, run, "steps", bind=True)
        self.batches = [open_socket(zmq.PUSH, run, "batches", rank) for rank in range(self.config.learner.ranks)]

        self._learner = b""  # address of rank 0, known from its first message
        self._saves: list[messages.SaveRequest] = []  # of versions that are not published yet
        self._orders: defaultdict[tuple[int, int], Reorder[ServerMessage]] = defaultdict(Reorder)  # by incarnation
        self._acks: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self._outgoing: list[tuple[int, int, Message]] = []  # to servers (index, incarnation), sent once per turn
        self._waiting_since = time.monotonic()  # the learner's earliest possible wait for batch n
        self.counts = {"trajectories": 0, "invalid": 0, "tickets": 0, "cancels": 0}
        self._malformed = Malformed("broker")

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        process = self.process
        # First tokens before results, results before deaths: as much as possible counts before it is tried again.
        handlers = {
            self.usage: self._from_proxy,
            self.trajectories: self._from_server,
            self.tickets: self._from_server,
            self.steps: self._from_learner,
        }
        receiver = Receiver(handlers, self._malformed, process.wake_fd)

        process.busy = True  # the loop turns even without messages: a frozen progress is a hang
        while not process.stopping:
            with process.waits.on("env_server" if self.core.batches.requested else "learner"):
                receiver.wait(self._wait_s())
            receiver.drain()

            for message in process.received():
                if isinstance(message, messages.PeerDied) and message.role == "env_server":
                    self._orders.pop((message.index, message.incarnation), None)
                    self._carry_out(self.core.server_left(message.index, message.incarnation, time.monotonic()))
            self._carry_out(self.core.tick(time.monotonic()))

            self._send_to_servers()
            self._watch()
            process.progress += 1
            process.stats = self._stats()

    def close(self) -> None:
        for socket in (self.tickets, self.trajectories, self.usage, self.steps, *self.batches):
            socket.close()

    def _wait_s(self) -> float:
        deadline = self.core.next_deadline()
        return POLL_S if deadline is None else min(POLL_S, max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------ messages to events

    def _from_proxy(self, message: Message, _peer: bytes) -> None:
        now = time.monotonic()
        match message:
            case messages.Usage(session, tokens, lost):
                self._carry_out(self.core.usage(session, tokens, lost, now))
            case messages.FirstToken(_, session, version):
                self._carry_out(self.core.first_token(session, version, now))
            case _:
                raise ProtocolError(f"{type(message).__name__} on the usage socket")

    def _from_server(self, message: Message, _peer: bytes) -> None:
        """Messages of one server, from either socket, in the order of their sequence numbers."""
        if not isinstance(message, ServerMessage):
            raise ProtocolError(f"{type(message).__name__} from an environment server")
        key = (message.server, message.incarnation)
        if isinstance(message, messages.Trajectory):  # also one that was taken before: its acknowledgement was lost
            self._acks[key].append(message.ticket_id)
        if self.core.servers.is_dead(*key):
            return

        try:
            due = self._orders[key].push(message.seq, message)
        except ValueError as error:
            raise ProtocolError(f"environment server {key}: {error}") from None
        for each in due:
            self._server_event(each, time.monotonic())

    def _server_event(self, message: ServerMessage, now: float) -> None:
        core = self.core
        match message:
            case messages.Trajectory():
                self.counts["trajectories"] += 1
                wrong = fault(message)
                if wrong:
                    self.counts["invalid"] += 1
                    self._carry_out(core.failed(message.ticket_id, f"invalid trajectory: {wrong}", now))
                else:
                    self._carry_out(core.finished(message.ticket_id, outcome_of(message), now))

            case messages.TicketFailed(ticket_id=ticket_id, reason=reason, turns=turns):
                self._carry_out(core.failed(ticket_id, reason, now, turns))
            case messages.TicketCancelled(ticket_id=ticket_id, turns=turns):
                self._carry_out(core.cancelled(ticket_id, now, turns))
            case messages.ServerHello(server, incarnation, capacity):
                self._carry_out(core.server_joined(server, incarnation, capacity, now))

    def _from_learner(self, message: Message, peer: bytes) -> None:
        now = time.monotonic()
        self._learner = peer
        match message:
            case messages.BatchRequest(step):
                self._carry_out(self.core.batch_requested(step, now))
            case messages.Published(version):
                self._waiting_since = now
                self._carry_out(self.core.published(version, now))
                self._save()

            case messages.EvalRequest(version, tasks):
                self._carry_out(self.core.eval_requested(version, tasks, now))
            case messages.SaveRequest():
                self._saves.append(message)
                self._save()
            case _:
                raise ProtocolError(f"{type(message).__name__} on the steps socket")

    def _save(self) -> None:
        """Answer the requests for this version's journal; those for a later one wait for its publication."""
        n = self.core.n
        for request in [each for each in self._saves if each.version.n <= n]:
            if request.version.n < n:
                raise RunStopped(f"the learner asks for the journal of version {request.version.n} at version {n}")
            self._saves.remove(request)
            state = msgspec.msgpack.encode(self.core.snapshot())
            send_to(self.steps, self._learner, messages.Journal(request.version, state))

    # ------------------------------------------------------------ actions to messages

    def _carry_out(self, wanted: list[actions.Action]) -> None:
        for action in wanted:
            match action:
                case actions.IssueTicket(server, ticket):
                    self.counts["tickets"] += 1
                    self._tell(server, ticket)
                case actions.RevokeTickets(server, ticket_ids):
                    self.counts["cancels"] += len(ticket_ids)
                    self._tell(server, messages.CancelTickets(ticket_ids))
                case actions.EmitBatch():
                    shards = make_shards(action, self.core.epoch, len(self.batches))
                    for socket, shard in zip(self.batches, shards, strict=True):
                        send(socket, shard)

                case actions.EvalReport():
                    self._keep_episodes(action)
                    self.process.send(messages.Metrics(action.version.n, _eval_metrics(action)))
                case actions.Finished():
                    self.process.send_closing_report()
                case actions.StopRun(reason):
                    raise RunStopped(reason)

    def _keep_episodes(self, report: actions.EvalReport) -> None:
        """`<run>/evals.jsonl`: one line per evaluated episode, in the order of the tasks."""
        with (self.process.run.folder / "evals.jsonl").open("ab") as file:
            for episode in report.episodes:
                row = {"version": report.version.n, **msgspec.structs.asdict(episode)}
                file.write(msgspec.json.encode(row) + b"\n")

    def _tell(self, index: int, message: Message) -> None:
        server = self.core.servers.by_index.get(index)
        if server is not None:
            self._outgoing.append((index, server.incarnation, message))

    def _send_to_servers(self) -> None:
        """All at once: the socket's thread is woken once, and writes many messages in one call."""
        for (index, incarnation), ticket_ids in self._acks.items():
            self._outgoing.append((index, incarnation, messages.AckTickets(ticket_ids)))
        for index, incarnation, message in self._outgoing:
            try:
                send_to(self.tickets, identity("env_server", index, incarnation), message)
            except PeerGone:
                pass  # it died: its PeerDied gives back what it held
        self._acks.clear()
        self._outgoing.clear()

    # ------------------------------------------------------------ waiting

    def _watch(self) -> None:
        """The learner waits for batch n from the publication of n, if it has asked. Raises WaitExpired."""
        core = self.core
        deadline_s = self.config.learner.batch_deadline_s
        asked = core.batches.requested.get(core.n)
        if asked is None or time.monotonic() - max(asked, self._waiting_since) <= deadline_s:
            return

        error = WaitExpired(
            f"learner.0 waited {deadline_s:g} s for the broker: batch {core.n} (learner.batch_deadline_s); "
            f"the broker waits for {self._whom()}"
        )
        error.add_note(json.dumps(core.describe(), indent=2))
        raise error

    def _whom(self) -> str:
        core = self.core
        if core.epoch < 0:
            return "the learner's first version"
        if not core.servers.by_index:
            return "an environment server"
        late = {index: order.waiting for (index, _), order in self._orders.items() if order.waiting}
        if late:
            return f"missing messages of environment servers {late}"
        groups = f"{core.groups.ready} of {core.rules.groups_per_batch} groups ready"
        return f"{core.servers.outstanding} episodes of the environment servers ({groups})"

    def _stats(self) -> dict[str, float]:
        samples = self.core.ledger.report()["samples"]
        queue = {f"queue_{state}": float(samples[state]) for state in ("queued", "running", "waiting", "batched")}
        others = {"outstanding": self.core.servers.outstanding, "malformed": self._malformed.count}
        return queue | self.counts | others


def _eval_metrics(report: actions.EvalReport) -> dict[str, float]:
    versions = list(report.versions) or [-1]
    values = {name: getattr(report, name) for name in ("reward", "accuracy", "length", "failed", "seconds")}
    values |= {"version_min": min(versions), "version_max": max(versions)}
    return {f"eval/{name}": float(value) for name, value in values.items()}


def main() -> None:
    tune_memory()
    with Process("broker", context_from_command_line()) as process:
        broker = Broker(process)
        try:
            broker.run()
        finally:
            broker.close()
    zmq.Context.instance().term()  # no shard is being sent any more, within the linger, from memory that the exit frees


if __name__ == "__main__":
    main()
