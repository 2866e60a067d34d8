"""A learner process under test, and everything it talks to, played by the test over real sockets."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import zmq

from experiments.bench._inbox import receive_from
from experiments.columns import token_columns
from launch.launcher.local import Command, LocalHandle
from rl.weights.host import clean_up
from rl.wire.messages import (
    BatchPart,
    BatchRequest,
    Done,
    Fatal,
    Heartbeat,
    Journal,
    Message,
    Metrics,
    PeerDied,
    Published,
    Register,
    SampleRow,
    SaveRequest,
    Stop,
    Version,
    in_frames,
)
from rl.wire.run import RunFile
from rl.wire.sockets import identity, open_socket, send, send_to
from tests.copies import begin

M = TypeVar("M", bound=Any)


class Harness:
    """Broker and supervisor of one run. Messages are kept in `inbox` in the order they came."""

    def __init__(self, run: RunFile, module: str = "rl.learner.process") -> None:
        self.run = run
        self.module = module
        self.incarnation = 0
        self.ranks = run.config.learner.ranks
        self.inbox: list[Message] = []
        self.registered: set[tuple[int, int]] = set()  # (rank, incarnation)
        self.children: list[psutil.Process] = []
        self.learner = b""  # identity on the socket `steps`
        self.context = zmq.Context()
        self.control = open_socket(zmq.ROUTER, run, "control", bind=True, context=self.context)
        self.steps = open_socket(zmq.ROUTER, run, "steps", bind=True, context=self.context)
        self.batch_parts = [
            open_socket(zmq.DEALER, run, "batches", rank, identity=identity("broker", 0), context=self.context)
            for rank in range(self.ranks)
        ]

    def start(self) -> Harness:
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        for rank in range(self.ranks):
            arguments = ["--run", str(self.run.folder), "--index", str(rank), "--incarnation", str(self.incarnation)]
            with (
                (self.run.folder / f"learner.{rank}.log").open("wb") as log,
                Path(os.devnull).open("rb") as nothing,
            ):
                self.children.append(begin(Command(self.module, arguments, environment), (nothing, log, log)))
        return self

    def restart(self) -> None:
        """Kill all ranks in whatever they do, and start the next ones."""
        self.kill()

        before = -1
        while len(self.inbox) > before:  # the last words of the dead
            before = len(self.inbox)
            self.pump(0.3)

        self.children.clear()
        self.inbox.clear()
        self.incarnation += 1
        self.start()

    def __enter__(self) -> Harness:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def kill(self) -> None:
        running = [child for child in self.children if LocalHandle(child).poll() is None]
        for child in running:
            child.send_signal(signal.SIGKILL)
        for child in running:
            child.wait()

    def close(self) -> None:
        try:
            self.kill()
        finally:  # a context that is never destroyed, its sockets open, stops whoever collects garbage
            self.context.destroy(linger=0)
            clean_up(self.run.run_id)

    def pump(self, timeout_s: float = 0.1) -> None:
        """Take what has arrived on both sockets."""
        poller = zmq.Poller()
        for socket in (self.control, self.steps):
            poller.register(socket, zmq.POLLIN)
        for socket, _ in poller.poll(int(timeout_s * 1000)):
            peer, message = receive_from(socket)
            if socket is self.steps:
                self.learner = peer
            if (
                isinstance(message, SaveRequest) and LocalHandle(self.children[0]).poll() is None
            ):  # the dead take no answer
                self.answer(Journal(message.version, f"journal {message.version.n}".encode()))
            if isinstance(message, Register):
                self.registered.add((message.index, message.incarnation))
            elif not isinstance(message, Heartbeat):
                self.inbox.append(message)

    def take(self, kind: type[M], deadline_s: float = 180.0) -> M:
        """The next message of this type; others stay. A learner that gives up instead fails the test with its log."""
        deadline = time.monotonic() + deadline_s
        while True:
            for message in self.inbox:
                if isinstance(message, kind):
                    self.inbox.remove(message)
                    return message
            if kind is not Fatal:
                fatal = [message for message in self.inbox if isinstance(message, Fatal)]
                assert not fatal, f"{fatal[0].message}\n{fatal[0].detail}\n{self.logs()}"
            assert time.monotonic() < deadline, f"no {kind.__name__} within {deadline_s} s\n{self.logs()}"
            self.pump()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.run.folder.glob("learner.*.log")))

    def send_batch(self, batch_parts: list[BatchPart]) -> None:
        for socket, batch_part in zip(self.batch_parts, batch_parts, strict=True):
            send(socket, in_frames(batch_part))

    def train(self, batches: list[list[BatchPart]]) -> list[Metrics]:
        """Serve every batch as it is asked for; returns the metrics rows."""
        rows = []
        for batch in batches:
            assert self.take(BatchRequest).step == batch[0].step
            self.send_batch(batch)
            rows.append(self.take(Metrics))
        return rows

    def published(self, n: int) -> None:
        assert self.take(Published) == Published(Version(self.run.timeline, n))

    def answer(self, message: Message) -> None:
        send_to(self.steps, self.learner, message)

    def tell(self, message: Stop | PeerDied) -> None:
        """As the supervisor, to every rank, once it has registered."""
        deadline = time.monotonic() + 240
        for rank in range(self.ranks):
            while (rank, self.incarnation) not in self.registered:
                assert time.monotonic() < deadline, f"rank {rank} did not register\n{self.logs()}"
                self.pump()
            send_to(self.control, identity("learner", rank, self.incarnation), message)

    def finish(self) -> Done:
        done = self.take(Done)
        self.stop()
        return done

    def stop(self, deadline_s: float = 120.0) -> None:
        """Tell every rank to stop, and require that all exit cleanly."""
        self.tell(Stop("test"))
        deadline = time.monotonic() + deadline_s
        codes = [child.wait(max(0.1, deadline - time.monotonic())) for child in self.children]
        assert codes == [0] * self.ranks, self.logs()


def make_batch(
    step: int,
    *,
    ranks: int = 1,
    groups: int = 4,
    group_size: int = 2,
    vocab: int = 64,
    version: int | None = None,
    timeline: int = 0,
    seed: int = 0,
) -> list[BatchPart]:
    """One random batch of `groups * group_size` two-turn samples, as a batch part per rank (whole groups in turn)."""
    random = np.random.default_rng(1000 * seed + step)
    samples: list[dict[str, Any]] = []
    for sample in range(groups * group_size):
        lengths = random.integers(2, 7, size=4)  # prompt, answer, observation, answer
        mask = np.repeat(np.array([0, 1, 0, 1], np.uint8), lengths)
        tokens = int(lengths.sum())

        samples.append(
            {
                "ids": random.integers(1, vocab, tokens).astype(np.int32),
                "mask": mask,
                "logp": np.where(mask, random.uniform(-5, -3, tokens), 0).astype(np.float32),
                "starts": [int(lengths[0]), int(lengths[:3].sum())],
                "group": 10 * step + sample // group_size,
                "id": 100 * step + sample,
                "reward": float(random.random() < 0.5) + 0.25 * (sample % group_size),
            }
        )
    made_by = step if version is None else version
    rows = [SampleRow(s["id"], s["group"], s["reward"], len(s["ids"]), int(s["mask"].sum()), made_by) for s in samples]
    return [_batch_part(step, rank, ranks, timeline, made_by, rows, samples, group_size) for rank in range(ranks)]


def _batch_part(
    step: int,
    rank: int,
    ranks: int,
    timeline: int,
    version: int,
    rows: list[SampleRow],
    samples: list[dict[str, Any]],
    group_size: int,
) -> BatchPart:
    members = [i for i in range(len(samples)) if (i // group_size) % ranks == rank]
    mine = [samples[i] for i in members]

    return BatchPart(
        step=step,
        rank=rank,
        timeline=timeline,
        rows=rows,
        members=members,
        lengths=[len(s["ids"]) for s in mine],
        turn_starts=[s["starts"] for s in mine],
        columns=token_columns(
            token_ids=np.concatenate([s["ids"] for s in mine]),
            loss_mask=np.concatenate([s["mask"] for s in mine]),
            logp_behavior=np.concatenate([s["logp"] for s in mine]),
            policy_version=version,
        ),
        loss_tokens=sum(row.loss_tokens for row in rows),
        metrics={"staleness/mean": float(step - version)},
    )
