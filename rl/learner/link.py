"""The learner's side of its protocol with broker, generators and supervisor, without torch.

    link = LearnerLink(process, manifest)
    link.publish(link.version(link.first_step), write)  # the initial weights reach the engines this way
    for shard in link.batches():                 # requested, awaited, checked
        ...train...
        link.publish(link.version(shard.step + 1), write)
        link.report(shard, values)
    link.finish()

Every rank receives its own shard of every batch and writes its own part of the weights; rank 0 alone speaks
(requests, publications, metrics). The real learner and the simulated one drive this same object.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import zmq

from rl.core.batch_files import write_shard_file
from rl.core.messages import (
    BatchRequest,
    EvalRequest,
    Journal,
    Message,
    Metrics,
    PeerDied,
    Published,
    SaveRequest,
    Shard,
    Stop,
    Version,
)
from rl.core.process import Process, WaitExpired
from rl.core.sockets import identity, open_socket, receive, send
from rl.learner.batches import check_shard
from rl.weights import make_writer
from rl.weights.layout import Manifest, Segment
from rl.weights.service import UpdaterService

T = TypeVar("T")
_POLL_MS = 100  # how soon a failed weight update is noticed while waiting


class Stopped(Exception):
    """The supervisor has told this process to stop."""


class LearnerLink:
    """Sockets `batches.<rank>` (PULL, bound here) and, on rank 0, `steps` (DEALER) and the weight updater."""

    def __init__(self, process: Process, manifest: Manifest) -> None:
        self.process = process
        self.run = process.run
        self.config = process.config
        self.rank = process.index
        self.first_step = self.run.start_step
        self.last_step = self.run.start_step + self.config.steps  # one past the last batch
        self._shards = open_socket(zmq.PULL, self.run, "batches", self.rank, bind=True)
        self._writer = make_writer(self.run, self.rank, manifest)
        self._writer.open()

        self._steps: zmq.Socket[bytes] | None = None
        self._service: UpdaterService | None = None
        if self.rank == 0:
            name = identity("learner", 0, process.incarnation)
            self._steps = open_socket(zmq.DEALER, self.run, "steps", identity=name)
            self._service = UpdaterService(self.run, process, manifest.total_bytes)
            self._service.start()
            process.closing_report = self._closing_report

        self._waited_s = 0.0  # for the current batch
        self._began = self._reported = time.monotonic()
        self._summary: dict[str, Any] = {"steps": 0}

    # ------------------------------------------------------------ batches

    def version(self, n: int) -> Version:
        """Version `n` of this start of the run."""
        return Version(self.run.epoch, n)

    def batches(self) -> Iterator[Shard]:
        """This rank's shard of every remaining step, in order.

        The next batch is requested as soon as one has arrived, so it is assembled and sent during training.
        Raises WaitExpired after `learner.batch_deadline_s`, Stopped when told to stop, StaleBatch, ValueError.
        """
        self._request(self.first_step)
        for step in range(self.first_step, self.last_step):
            shard = self._receive(step)
            self._request(step + 1)
            self.process.busy = True
            yield shard

    def _request(self, step: int) -> None:
        if self._steps is not None and step < self.last_step:
            send(self._steps, BatchRequest(step))

    def _receive(self, step: int) -> Shard:
        begin = time.monotonic()
        deadline_s = self.config.learner.batch_deadline_s
        message = self._wait(self._shards, "broker", deadline_s, f"batch {step} (learner.batch_deadline_s)")
        self._waited_s = time.monotonic() - begin
        if not isinstance(message, Shard):
            raise ValueError(f"learner.{self.rank} waited for a shard and received {type(message).__name__}")

        bound = self.config.rollout.staleness_bound
        check_shard(message, step=step, rank=self.rank, epoch=self.run.epoch, staleness_bound=bound)
        if self.config.tracking.save_batches:
            write_shard_file(self.run.folder, message)
        return message

    # ------------------------------------------------------------ weights, journal, metrics

    def publish(
        self,
        version: Version,
        write: Callable[[memoryview], Iterable[Segment]],
        probe_ids: Sequence[int] = (),
        probe_logp: Sequence[float] = (),
    ) -> None:
        """Offer `version` to the generators, tell the broker, ask for an evaluation when one is due.

        `write` copies this rank's part into the slot and returns the byte ranges written. Rank 0 waits until
        every rank has committed, and no rank waits for a generator. Raises WaitExpired, WeightsError.
        """
        self.process.busy = False  # every wait from here on has a deadline of its own
        self._writer.commit(
            write(self._wait_while_listening("slot", lambda wait_s: self._writer.begin(version, wait_s)))
        )
        if self._steps is None or self._service is None:
            return

        checksum = self._wait_while_listening(
            "other ranks' part", lambda wait_s: self._writer.checksum(version, wait_s)
        )
        self._service.publish(version, checksum, list(probe_ids), list(probe_logp))
        send(self._steps, Published(version))
        if self._evaluation_due(version.n):
            send(self._steps, EvalRequest(version, self.config.eval.tasks))

    def _wait_while_listening(self, part: str, ask: Callable[[float], T]) -> T:
        """`ask(seconds)`, again and again for `weights.deadline_s`. Raises WaitExpired, Stopped.

        It listens to the supervisor meanwhile: the death of a generator may be what frees a slot, and a rank that
        was told to stop commits nothing more.
        """
        deadline_s = self.config.weights.deadline_s
        deadline = time.monotonic() + deadline_s
        while True:
            self.listen()
            try:
                return ask(_POLL_MS / 1000)
            except WaitExpired as error:
                if time.monotonic() >= deadline:
                    raise WaitExpired(f"no {part} within weights.deadline_s={deadline_s:g} s: {error}") from None

    def _evaluation_due(self, n: int) -> bool:
        every = self.config.eval.every
        ends = n in (self.first_step, self.last_step)
        return self.config.eval.tasks > 0 and (ends or (every > 0 and n % every == 0))

    def checkpoint_due(self, n: int) -> bool:
        """Every `learner.checkpoint_every` batches, and after the last one."""
        every = self.config.learner.checkpoint_every
        return n == self.last_step or (every > 0 and n % every == 0)

    def journal(self, version: Version) -> bytes:
        """The broker's journal at this version; empty on other ranks. Raises WaitExpired after timeouts.hang_s."""
        if self._steps is None:
            return b""
        send(self._steps, SaveRequest(version))
        deadline_s = self.config.timeouts.hang_s
        message = self._wait(self._steps, "broker", deadline_s, f"journal of version {version.n} (timeouts.hang_s)")
        if not isinstance(message, Journal) or message.version != version:
            raise ValueError(f"asked the broker for its journal of {version}, received {message!r:.200}")
        return message.state

    def report(self, shard: Shard, values: dict[str, float]) -> None:
        """The metrics row of one trained batch: the broker's view, `values`, and what the protocol itself took."""
        now = time.monotonic()
        step_s = now - self._reported
        self._reported = now

        tokens = float(sum(row.tokens for row in shard.rows))
        row = shard.metrics | values
        row |= {
            "train/reward": float(np.mean([row.reward for row in shard.rows])),
            "time/step": step_s,
            "time/wait_batch": self._waited_s,
            "tokens/trained": tokens,
            "tokens_per_second": tokens / step_s,
        }

        if self._service is not None:
            row |= {f"weight_sync/{key}": value for key, value in self._service.stats().items()}
            staleness = [float(shard.step - sample.version) for sample in shard.rows]
            self.process.send(Metrics(shard.step + 1, row, {"staleness": staleness}))

        ends = {key: row[f"train/{key}"] for key in ("reward", "loss") if f"train/{key}" in row}
        self._summary.setdefault("first", ends)
        self._summary["last"] = ends
        self._summary["steps"] += 1
        self.process.progress += 1
        self.listen()

    def _closing_report(self) -> dict[str, Any]:
        assert self._service is not None
        seconds = time.monotonic() - self._began
        waits = dict(self.process.waits.seconds)
        return {
            "seconds": seconds,
            "waits": waits,
            "wait_fraction": waits.get("broker", 0.0) / seconds,
            "weight_sync": self._service.stats(),
            **self._summary,
        }

    def finish(self) -> None:
        """Send the closing report, then serve weights until told to stop."""
        self.process.send_closing_report()
        self.process.busy = False
        with contextlib.suppress(Stopped):
            while True:
                select.select([self.process.wake_fd], [], [], _POLL_MS / 1000)
                self.listen()

    # ------------------------------------------------------------ waiting

    def listen(self) -> None:
        """Act on what the supervisor said, and on a weight update that failed. Raises Stopped, or that failure."""
        for message in self.process.received():
            if isinstance(message, Stop):
                raise Stopped(message.reason)
            if isinstance(message, PeerDied) and message.role == "generator":
                self._writer.end_leases(f"generator-{message.index}", message.incarnation)
                if self._service is not None:
                    self._service.peer_died(message)
        if self.process.stopping:
            raise Stopped("stopping")
        if self._service is not None:
            self._service.raise_if_failed()

    def _wait(self, socket: zmq.Socket[bytes], whom: str, deadline_s: float, what: str) -> Message:
        """The next message of `socket`, honouring Stop and failures of the weight updates meanwhile."""
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self.process.wake_fd, zmq.POLLIN)
        deadline = time.monotonic() + deadline_s
        with self.process.waits.on(whom):
            while True:
                self.listen()
                if dict(poller.poll(_POLL_MS)).get(socket):
                    return receive(socket)
                if time.monotonic() >= deadline:
                    raise WaitExpired(f"learner.{self.rank} waited {deadline_s:g} s for {whom}: {what}")

    def close(self) -> None:
        """Close the sockets, end the weight updater and free the slots."""
        if self._service is not None:
            self._service.stop()
        for socket in (self._shards, self._steps):
            if socket is not None:
                socket.close(linger=500)
        self._writer.close()
