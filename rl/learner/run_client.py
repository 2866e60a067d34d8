"""The learner's side of its protocol with broker, generators and supervisor, without torch.

    client = RunClient(process, entries, first_step)
    client.publish(first_step, pieces)             # the initial weights reach the engines this way
    for batch_part in client.batches():                 # requested, awaited, checked
        ...train...
        client.publish(batch_part.step + 1, pieces)
        client.report(batch_part, values)
    client.finish()

Every rank receives its own batch part of every batch and writes its own part of the weights; rank 0 alone speaks
(requests, publications, metrics). The real learner and the simulated one drive this same object.

`Client` is what the training loop knows of it: in supervised training rows take the broker's place
(`rl/learner/supervised.py`).
"""

from __future__ import annotations

import contextlib
import select
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import zmq

from rl.learner.batches import check_batch_part
from rl.learner.changes import reachable, unfinished
from rl.learner.publications import Publications
from rl.observe import trace_events
from rl.store.checkpoint_folder import latest, read_meta, verify
from rl.weights import make_sender
from rl.weights.channel import Entry, Piece, WeightsError, bytes_of
from rl.weights.service import UpdaterService
from rl.weights.turns import POLL_S, Turns
from rl.wire import messages
from rl.wire.awake import Awake
from rl.wire.messages import BatchPart, Journal, Message, ProtocolError, Stop, Version
from rl.wire.process import Process, WaitExpired
from rl.wire.receiving import Malformed, Receiver
from rl.wire.sockets import made_again, open_socket, send

T = TypeVar("T")
M = TypeVar("M", BatchPart, Journal)
_TURN_S = 1.0  # of a wait, with what is done in it
_POLL_MS = 100  # how soon a failed weight update is noticed while waiting
EMPTY: Mapping[str, list[float]] = MappingProxyType({})
ToBroker = messages.BatchRequest | messages.Published | messages.EvalRequest | messages.SaveRequest


class BrokerLine:
    """Rank 0's line to the broker (`steps`), which outlives the broker's process and a broken connection.

    What has no answer yet is kept, and told again in the same order. All of it may come twice: the broker takes it
    once, or answers as before. `socket` is another one after `reopen`.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._unanswered: deque[ToBroker] = deque()
        self.socket = self._open()

    def tell(self, message: ToBroker) -> None:
        self._unanswered.append(message)
        send(self.socket, message)

    def answered(self, message: ToBroker) -> None:
        """The broker has taken it, and so everything that was told before."""
        while self._unanswered and self._unanswered.popleft() != message:
            pass

    def forget(self) -> None:
        """Nobody waits any more for what has no answer."""
        self._unanswered.clear()

    def reopen(self) -> None:
        """The broker's process has died: a new socket sends nothing into the dead one's."""
        self.socket.close(linger=0)
        self.socket = self._open()
        self._tell_again()

    def mend(self) -> None:
        """Call now and then: where the connection was made again, what was on its way is told again."""
        if made_again(self.socket):
            self._tell_again()

    def _tell_again(self) -> None:
        for message in self._unanswered:
            send(self.socket, message)

    def _open(self) -> zmq.SyncSocket:
        name = self._process.run.names.of("learner", 0, self._process.incarnation)
        return open_socket(zmq.DEALER, self._process.run, "steps", identity=name)


class Stopped(Exception):
    """The supervisor has told this process to stop."""


def begin_from(process: Process) -> tuple[Path | None, int]:
    """The checkpoint to begin from, and its step: the run's newest after a death, else `resume`; None: the start model.

    Raises CheckpointError if it is damaged.
    """
    run = process.run
    undone = unfinished(run.folder, Publications(run.folder, run.timeline).timeline)
    newest = latest(run.folder / "checkpoints") if undone is None else reachable(run.folder).get(undone)
    if newest is None:
        return run.config.resume, run.start_step
    return newest, (verify if process.index == 0 else read_meta)(newest).step


class Client(ABC):
    """Where a rank has its batches from, and whom it tells what came of them. All ranks call the same methods."""

    def __init__(self, process: Process, first_step: int) -> None:
        self.process = process
        self.run = process.run
        self.config = process.config
        self.rank = process.index
        self.first_step = first_step
        self.last_step = self.run.last_step
        self._step = first_step
        self._ended_at = self.last_step
        self._began = self._reported = time.monotonic()
        self._summary: dict[str, Any] = {"steps": 0}

    @property
    @abstractmethod
    def timeline(self) -> int:
        """The timeline of what is trained now."""

    @abstractmethod
    def batches(self) -> Iterator[BatchPart]:
        """This rank's batch part of every remaining step, in order."""

    @abstractmethod
    def publish(
        self, n: int, pieces: Iterable[Piece], probe_ids: Sequence[int] = (), probe_logp: Sequence[float] = ()
    ) -> bool:
        """Version `n` is there, of which `pieces` are this rank's part. False if a later one is known already."""

    @abstractmethod
    def take_devices(self) -> None:
        """Until no engine uses a device of the learner's ranks, or begins to. All ranks call it, and then meet."""

    @abstractmethod
    def give_devices(self) -> None:
        """Engines may use them, and go on with the newest version. All ranks have met, and call it."""

    @abstractmethod
    def journal(self, n: int) -> bytes:
        """What a checkpoint of version `n` keeps beside the weights; empty on other ranks than the first."""

    def report(
        self, batch_part: BatchPart, values: dict[str, float], histograms: Mapping[str, list[float]] = EMPTY
    ) -> None:
        """The metrics row of one trained batch: `values`, and how fast the rows were trained."""
        now = time.monotonic()
        step_s = now - self._reported
        self._reported = now

        tokens = float(sum(row.tokens for row in batch_part.rows))
        row = values | {
            "time/step": step_s,
            "version/timeline": float(self.timeline),
            "time/over": batch_part.over,
            "tokens/trained": tokens,
            "tokens_per_second": tokens / step_s,
        }
        if self.rank == 0:
            self.process.send(messages.Metrics(batch_part.step + 1, row, dict(histograms)))

        ends = {key: row[f"train/{key}"] for key in ("reward", "loss") if f"train/{key}" in row}
        self._summary.setdefault("first", ends)
        self._summary |= {"last": ends, "steps": self._summary["steps"] + 1}
        self.process.progress += 1

    def closing_report(self) -> dict[str, Any]:
        """The learner's part of the summary."""
        return {"seconds": time.monotonic() - self._began, **self._summary}

    def go_back(self, n: int) -> None:
        """Version `n` is the newest again. Raises ValueError where nobody can take anything back."""
        raise ValueError("only a run with a broker can go back")

    @abstractmethod
    def listen(self) -> None:
        """Act on what the supervisor said. Raises Stopped."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    def _evaluation_due(self, n: int) -> bool:
        every = self.config.eval.every
        ends = n in (self.run.start_step, self.last_step)
        return self.config.eval.tasks > 0 and (ends or (every > 0 and n % every == 0))

    def checkpoint_due(self, n: int) -> bool:
        """Every `learner.checkpoint_every` batches, and after the last one."""
        every = self.config.learner.checkpoint_every
        return n == self.last_step or (every > 0 and n % every == 0)

    @property
    def to_be_saved(self) -> int | None:
        """The step at which the run was asked to end; None if a checkpoint has it, or there is nothing to save."""
        step = self._ended_at
        is_new = self.first_step < step < self.last_step
        return step if is_new and not self.checkpoint_due(step) else None

    def finish(self) -> None:
        """Send the closing report, then serve weights until told to stop."""
        self.process.send_closing_report()
        self.process.busy = False
        with contextlib.suppress(Stopped):
            while True:
                select.select([self.process.wake_fd], [], [], _POLL_MS / 1000)
                self.listen()

    def span(self, name: str) -> AbstractContextManager[None]:
        """What is done in the block, for the trace."""
        return self.process.trace.span(name, self._step)


class RunClient(Client):
    """Sockets `batches.<rank>` (ROUTER, bound here) and, on rank 0, `steps` (DEALER) and the weight updater."""

    def __init__(self, process: Process, entries: Sequence[Entry], first_step: int) -> None:
        super().__init__(process, first_step)
        self._batch_parts = open_socket(zmq.ROUTER, self.run, "batches", self.rank, bind=True)
        self._publications = Publications(self.run.folder, self.run.timeline)

        self._anew = unfinished(self.run.folder, self._publications.timeline) is not None
        """Whether what is published next was taken back."""
        self._requested = first_step - 1  # the newest batch asked for

        self._broker: BrokerLine | None = None
        self._broker_since = 0.0
        self._awake = Awake(time.monotonic(), _TURN_S)
        self._service: UpdaterService | None = None
        self._turns = Turns(self.run, alone=True) if self.config.alternates and self.rank == 0 else None
        self._sender = make_sender(self.run, self.rank, entries, self._wait_while_listening)
        self._sender.open()
        if self.rank == 0:
            self._broker = BrokerLine(process)
            self._service = UpdaterService(self.run, process, bytes_of(entries))
            self._service.start()
            process.closing_report = self.closing_report

        self._malformed = Malformed(f"learner.{self.rank}")
        self._waited_s = 0.0  # for the current batch

    def _clock(self) -> float:
        """The time by which others are judged."""
        return self._awake.read(time.monotonic())

    @property
    def timeline(self) -> int:
        """The timeline of what rank 0 publishes now."""
        return self._publications.timeline

    # ------------------------------------------------------------ batches

    def batches(self) -> Iterator[BatchPart]:
        """This rank's batch part of every remaining step, in order.

        The next batch is requested as soon as one has arrived, so it is assembled and sent during training. Only where
        its version was published before, it is requested after that: it may come out otherwise this time, and the
        batch with it. Raises WaitExpired when it comes no nearer for `learner.batch_deadline_s`, Stopped when told to
        stop, RunAlarm, ValueError.
        """
        self._step = self.first_step
        while self._step < self.last_step:
            step = self._step
            self._request(step)
            batch_part = self._receive(step)
            if batch_part.over >= 1:
                self._end_at(step + bool(batch_part.rows))
            if not batch_part.rows:
                self._ended_at = step
                return

            if step >= self._publications.newest:
                self._request(step + 1)
            self.process.busy = True
            yield batch_part
            self._step += 1

    def go_back(self, n: int) -> None:
        """Version `n` is published next, in a new timeline, and batch `n` is the next one."""
        self._anew = True
        self._step = self._requested = n - 1
        if self._broker is not None:
            self._broker.forget()

    def _end_at(self, step: int) -> None:
        """The run's time is over: version `step` is its last. One that was published before is evaluated now."""
        self.last_step = step
        if step == self._step and self._broker is not None and self.config.eval.tasks:
            self._broker.tell(messages.EvalRequest(Version(self.timeline, step), self.config.eval.tasks))

    def _request(self, step: int) -> None:
        """Ask for the batch of this step, unless it has been asked for."""
        if self._broker is not None and self._requested < step < self.last_step:
            self._requested = step
            self._broker.tell(messages.BatchRequest(step))

    def _receive(self, step: int) -> BatchPart:
        begin = time.monotonic()
        deadline_s = self.config.learner.batch_deadline_s
        what = f"batch {step} (learner.batch_deadline_s)"

        while True:
            batch_part = self._wait(lambda: self._batch_parts, BatchPart, deadline_s, what)
            # Else it was sent to an earlier incarnation, or again after the broker's death.
            if batch_part.step == step and batch_part.timeline >= self.run.timeline:
                break
        self._waited_s = time.monotonic() - begin
        if self._broker is not None:
            self._broker.answered(messages.BatchRequest(step))

        if not batch_part.rows:
            return batch_part
        bound = self.config.rollout.staleness_bound
        timeline = self.timeline if self.rank == 0 and step >= self._publications.newest else batch_part.timeline
        check_batch_part(batch_part, step=step, rank=self.rank, timeline=timeline, staleness_bound=bound)
        return batch_part

    # ------------------------------------------------------------ weights, journal, metrics

    def publish(
        self, n: int, pieces: Iterable[Piece], probe_ids: Sequence[int] = (), probe_logp: Sequence[float] = ()
    ) -> bool:
        """Offer version `n` to the generators, tell the broker, ask for an evaluation when one is due.

        False if the generators have a later one already, from before this learner started; ranks but the first do not
        know, and say True.

        `pieces` are this rank's part. Rank 0 waits until every rank has offered its own, and no rank waits for a
        generator. Raises WaitExpired, WeightsError.
        """
        self.process.busy = False  # every wait from here on has a deadline of its own
        self._sender.offer(n, pieces)
        if self._broker is None or self._service is None:
            return True

        receipt = self._sender.receipt(n)
        if receipt is None and self.config.learner.kind == "fsdp" and not self.config.weights.probe:
            transport = f"weights.transport={self.config.weights.transport!r} knows no checksum"
            raise WeightsError(f"{transport}, so nothing would tell wrong weights: set weights.probe=true")
        version = self._publications.add(n, receipt, anew=self._anew)
        self._anew = False
        announced = n == self._publications.newest  # else a later one is out there already
        if announced:
            self._sender.announce(version)
            self._service.publish(version, receipt, list(probe_ids), list(probe_logp))

        self._broker.tell(messages.Published(version))
        self.process.trace.add(trace_events.Published(version.timeline, version.n))
        if self._evaluation_due(n):
            self._broker.tell(messages.EvalRequest(version, self.config.eval.tasks))
        return announced

    def take_devices(self) -> None:
        """Rank 0 takes them for all. Raises WaitExpired where a generator does not rest, Stopped.

        The deadline is for one that does nothing of what others watch: starting, loading, draining.
        """
        if self._turns is None or self._service is None or self._turns.has:
            return
        deadline_s = self.config.weights.deadline_s + self.config.timeouts.hang_s
        begin = self._clock()
        self.process.busy = False
        self._service.take()

        with self.process.waits.on("generators", self._step + 1), self.span("wait devices"):
            while not self._turns.take():
                self.listen()

                late = self._service.late
                if not late:
                    begin = self._clock()
                elif self._clock() >= begin + deadline_s:
                    whom = ", ".join(map(str, late))
                    what = f"generator {whom} to rest (weights.deadline_s and timeouts.hang_s)"
                    raise WaitExpired(f"learner.{self.rank} waited {deadline_s:g} s for {what}")

                select.select([self.process.wake_fd], [], [], POLL_S)

        self.process.waits.ended()
        self.process.busy = True

    def give_devices(self) -> None:
        if self._turns is not None and self._service is not None and self._turns.has:
            self._turns.give()
            self._service.give()

    def _wait_while_listening(self, what: str, ask: Callable[[float], T]) -> T:
        """`ask(seconds)`, again and again for `weights.deadline_s`. Raises WaitExpired, Stopped.

        It listens to the supervisor meanwhile: the death of a generator may be what ends the wait, and a rank that
        was told to stop offers nothing more.
        """
        deadline_s = self.config.weights.deadline_s
        deadline = self._clock() + deadline_s
        with self.span(f"wait {what}"):
            while True:
                self.listen()
                try:
                    return ask(_POLL_MS / 1000)
                except WaitExpired as error:
                    if self._clock() >= deadline:
                        raise WaitExpired(f"no {what} within weights.deadline_s={deadline_s:g} s: {error}") from None

    def journal(self, n: int) -> bytes:
        """The broker's journal at version `n`; empty on other ranks. Raises WaitExpired.

        A broker that hangs is found after timeouts.hang_s, and its successor has timeouts.start_s to begin.
        """
        if self._broker is None:
            return b""
        version = Version(self.timeline, n)
        broker = self._broker
        newest = latest(self.run.folder / "checkpoints")
        request = messages.SaveRequest(version, newest=read_meta(newest).step if newest else 0)
        broker.tell(request)
        deadline_s = self.config.timeouts.hang_s + self.config.timeouts.start_s
        what = f"journal of version {n} (timeouts.hang_s and start_s)"

        while True:
            journal = self._wait(lambda: broker.socket, Journal, deadline_s, what)
            if journal.version == version:  # else it was asked for twice
                broker.answered(request)
                return journal.state

    def report(
        self, batch_part: BatchPart, values: dict[str, float], histograms: Mapping[str, list[float]] = EMPTY
    ) -> None:
        """With the broker's view, and what the protocol itself took."""
        rewards = [sample.reward for sample in batch_part.rows if not sample.unrewarded]
        row = batch_part.metrics | values | {"time/wait_batch": self._waited_s}
        if rewards:
            row["train/reward"] = float(np.mean(rewards))
        if self._service is not None:
            row |= {f"weight_sync/{key}": value for key, value in self._weight_stats().items()}

        spread = {
            "staleness": [float(batch_part.step - sample.version) for sample in batch_part.rows],
            "histogram/length": [float(sample.loss_tokens) for sample in batch_part.rows],
            "histogram/reward": rewards,
        }
        before = self._reported
        super().report(batch_part, row, spread | dict(histograms))
        if self._service is not None:
            self._check_starved(batch_part.step, self._reported - before)
        self.listen()

    def _check_starved(self, step: int, step_s: float) -> None:
        """A learner that shares CPUs or takes turns on GPUs waits while they do the work that it waits for."""
        if self.config.alternates or (self.config.learner.kind == "fsdp" and self.run.learner_device == "cpu"):
            return

        alarms = self.process.alarms
        most_s = max(alarms.limit("learner-starved", "s"), alarms.limit("learner-starved", "share") * step_s)
        found = f"{self._waited_s:.1f} of the {step_s:.1f} s of step {step} it waited for its batch"
        alarms.check("learner-starved", self._waited_s > most_s, found)

    def _weight_stats(self) -> dict[str, float]:
        assert self._service is not None
        return self._service.stats() | self._sender.stats()

    def closing_report(self) -> dict[str, Any]:
        told = super().closing_report()
        waits = dict(self.process.waits.seconds)
        fraction = waits.get("broker", 0.0) / told["seconds"]
        return told | {"waits": waits, "wait_fraction": fraction, "weight_sync": self._weight_stats()}

    # ------------------------------------------------------------ waiting

    def listen(self) -> None:
        """Act on what the supervisor said, and on a weight update that failed. Raises Stopped, or that failure."""
        for message in self.process.received():
            if isinstance(message, Stop):
                raise Stopped(message.reason)
            if isinstance(message, messages.PeerDied):
                self._peer_died(message)
        if self.process.stopping:
            raise Stopped("stopping")
        if self._broker is not None:
            self._broker.mend()
        if self._service is not None:
            self._service.raise_if_failed()

    def _peer_died(self, died: messages.PeerDied) -> None:
        if died.role == "broker":
            self._broker_since = self._clock()
            if self._broker is not None:
                self._broker.reopen()
        elif died.role == "generator":
            self._sender.receiver_died(f"generator-{died.index}", died.incarnation)
            if self._service is not None:
                self._service.peer_died(died)

    def _wait(self, socket_of: Callable[[], zmq.SyncSocket], kind: type[M], deadline_s: float, what: str) -> M:
        """The next message of this kind. Stop, failures of weight updates and a new broker are heard meanwhile."""
        begin = self._clock()
        arrived: list[M] = []

        def take(message: Message, peer: bytes) -> None:
            nonlocal begin
            if peer:
                self.run.names.sender(peer, "broker")
            if isinstance(message, messages.BatchUnderway):
                begin = self._clock()
                return
            if isinstance(message, messages.LongBatchPart):
                message = message.joined()
            if not isinstance(message, kind):
                raise ProtocolError(f"{type(message).__name__} instead of the {what}")
            arrived.append(message)

        with self.process.waits.on("broker", self._step + 1), self.span("wait broker"):
            while not arrived:
                if self._clock() >= max(begin, self._broker_since) + deadline_s:
                    raise WaitExpired(f"learner.{self.rank} waited {deadline_s:g} s for broker: {what}")
                self.listen()
                receiver = Receiver({socket_of(): take}, self._malformed, self.process.wake_fd, limit=1)
                receiver.wait(_POLL_MS / 1000)
                receiver.drain()
        self.process.waits.ended()
        return arrived[0]

    def close(self) -> None:
        """Close the sockets, end the weight updater and free what the channel holds."""
        if self._service is not None:
            self._service.stop()
        self._batch_parts.close(linger=500)
        if self._broker is not None:
            self._broker.socket.close(linger=500)
        self._sender.close()
        if self._turns is not None:
            self._turns.close()
