"""Acknowledged trajectories per second through the real broker process, against a bare loop.

    python -m experiments.bench broker [--rounds 5] [--seconds 5] [--tokens 4096] [--out FILE.json]

A producer process plays one environment server over ipc. It answers every ticket at once with a trajectory of
`--tokens` tokens (13 bytes each: 54 kB at 4096) and its usage. It counts a trajectory when its acknowledgement
arrives. This process plays supervisor and learner: it takes each batch and publishes the next version at once, so
tickets, ledger, assembly and batch parts are part of what is measured. The limit is the same producer, with as many
trajectories open, against a process that only receives and acknowledges; the two take turns. Also printed: the
broker's memory before any data and, without sockets, how many events the core handles in a second with 100 000 live
episodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq

from experiments.bench._inbox import receive_all, receive_from
from experiments.bench._measuring import Timing, cpu_s_of, parser_of, temporary_run, write
from experiments.bench._ratios import Idle, provenance, ratio_of
from experiments.columns import token_columns
from rl.wire.messages import (
    AckTickets,
    BatchRequest,
    Message,
    Published,
    Register,
    ServerHello,
    Stop,
    Ticket,
    TokenSequence,
    Trajectory,
    Turn,
    Usage,
    Version,
    encode,
)
from rl.wire.run import RunFile
from rl.wire.sockets import PeerGone, identity, open_socket, send, send_to
from rollout.broker.actions import EmitBatch, EpisodeOutcome, IssueTicket
from rollout.broker.core import BrokerCore
from rollout.broker.process import tune_memory
from rollout.broker.rules import Rules

OPEN = 512  # tickets that the producer holds at once
SETTINGS = ["rollout.groups_per_batch=16", "rollout.group_size=8", "rollout.alpha=8", "steps=1000000"]


class Encoded:
    """Trajectories encoded once per policy version: of each, only a few numbers in the header are its own."""

    MARKS = tuple(1 << bit for bit in range(58, 63))  # stand for these numbers: MessagePack writes each in 8 bytes

    def __init__(self, version: Version, tokens: int) -> None:
        ticket_id, sample_id, group_id, task_index, seq = self.MARKS
        header, *self.arrays = encode(
            Trajectory(
                server=0,
                incarnation=0,
                seq=seq,
                ticket_id=ticket_id,
                sample_id=sample_id,
                group_id=group_id,
                task_index=task_index,
                kind="train",
                timeline=version.timeline,
                sequences=[
                    TokenSequence(
                        columns=token_columns(np.zeros(tokens), np.ones(tokens), policy_version=version.n),
                        turns=[Turn(0, tokens, 1.0, 0.0, 0.0, "stop", 0)],
                    )
                ],
                reward=1.0,
                success=True,
                stop_reason="done",
                tokens_generated=tokens,
                seconds=0.0,
            )
        )

        self.header = bytes(header)

    def send(self, socket: zmq.Socket[bytes], ticket: Ticket, seq: int) -> None:
        """Send its frames, with the ticket's ids and the sequence number written into the header."""
        header = self.header
        own = (ticket.ticket_id, ticket.sample_id, ticket.group_id, ticket.task_index, seq)
        for mark, value in zip(self.MARKS, own, strict=True):
            header = header.replace(mark.to_bytes(8, "big"), value.to_bytes(8, "big"))
        frames = [header, *self.arrays]
        for index, frame in enumerate(frames):
            socket.send(frame, zmq.SNDMORE if index + 1 < len(frames) else 0)


def produce(run: RunFile, seconds: float, tokens: int, bare: bool) -> None:
    """The producer process; prints what it measured as one line of JSON."""
    tickets = open_socket(zmq.DEALER, run, "tickets", identity=identity("env_server", 0, 0))
    results = open_socket(zmq.DEALER, run, "trajectories", identity=identity("env_server", 0, 0))
    usage = open_socket(zmq.DEALER, run, "usage", identity=identity("proxy", 0))
    send(tickets, ServerHello(0, 0, OPEN))
    seq = acknowledged = 0
    encoded: dict[Version, Encoded] = {}
    begin = end = None

    while end is None or time.monotonic() < end:
        if not tickets.poll(10_000):
            raise SystemExit("the broker was silent for 10 s")

        for message in drain(tickets):
            match message:
                case Ticket(ticket_id=ticket_id, version=version) as ticket:
                    if version not in encoded:
                        encoded = {version: Encoded(version, tokens)}
                    seq += 1
                    if not bare:
                        send(usage, Usage(ticket_id, tokens))
                    encoded[version].send(results, ticket, seq)
                case AckTickets(ticket_ids):
                    acknowledged += len(ticket_ids)

        if begin is None and acknowledged >= 2 * OPEN:  # warm
            begin = time.monotonic()
            acknowledged = 0
            end = begin + seconds

    assert begin is not None
    rate = acknowledged / (time.monotonic() - begin)
    for socket in (tickets, results, usage):
        socket.close(linger=0)
    zmq.Context.instance().term()  # nothing is being sent any more from memory that the exit frees
    print(json.dumps({"per_s": rate, "sent": seq}))


def drain(socket: zmq.Socket[bytes]) -> Iterator[Message]:
    """Every message that is there now."""
    with suppress(zmq.Again):
        while True:
            yield from (message for _, message in receive_all(socket))


def bare_loop(run: RunFile) -> None:
    """The limit: receive, acknowledge, and hand out the next ticket; trajectories are not even decoded."""
    tickets = open_socket(zmq.ROUTER, run, "tickets", bind=True)
    results = open_socket(zmq.ROUTER, run, "trajectories", bind=True)
    peer = tickets.recv_multipart()[0]
    for ticket_id in range(OPEN):
        send_to(tickets, peer, Ticket(ticket_id, 0, 0, 0, Version(0, 0)))

    while True:
        results.poll()
        taken: list[int] = []
        while len(taken) < OPEN:
            try:
                results.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            taken.append(0)

        try:
            send_to(tickets, peer, AckTickets(taken))
            for ticket_id in taken:
                send_to(tickets, peer, Ticket(ticket_id, 0, 0, 0, Version(0, 0)))
        except PeerGone:
            return  # the producer has measured enough


def serve_broker(run: RunFile, producer: list[str]) -> dict[str, float]:
    """Supervisor and learner around the broker process."""
    control = open_socket(zmq.ROUTER, run, "control", bind=True)
    batch_parts = open_socket(zmq.ROUTER, run, "batches", 0, bind=True)
    broker = subprocess.Popen([sys.executable, "-m", "rollout.broker.process", "--run", str(run.folder)])

    try:
        while not isinstance(receive_from(_ready(control))[1], Register):
            pass
        learner = open_socket(zmq.DEALER, run, "steps", identity=identity("learner", 0))
        time.sleep(1.0)  # the broker has imported and opened everything
        watched = psutil.Process(broker.pid)
        memory = watched.memory_info().rss / 2**20
        cpu_begin = cpu_s_of(watched)
        send(learner, Published(Version(0, 0)))
        send(learner, BatchRequest(0))
        child = subprocess.Popen(producer, stdout=subprocess.PIPE, text=True)
        step = 0

        while child.poll() is None:
            if batch_parts.poll(100):
                batch_parts.recv_multipart(copy=False)
                step += 1
                send(learner, Published(Version(0, step)))
                send(learner, BatchRequest(step))
            while control.poll(0):
                receive_from(control)

        cpu_s = cpu_s_of(watched) - cpu_begin
        send_to(control, identity("broker", 0), Stop("done"))
        broker.wait(10)
        assert child.stdout is not None
        produced = json.loads(child.stdout.read())
        cpu_us = 1e6 * cpu_s / produced["sent"]
        return {"per_s": produced["per_s"], "cpu_us_per_trajectory": cpu_us, "mb_before_data": memory}
    finally:
        broker.kill()
        for socket in (control, batch_parts):
            socket.close(linger=0)


def _ready(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    if not socket.poll(30_000):
        raise SystemExit("the broker did not start in 30 s")
    return socket


def measure_limit(run: RunFile, producer: list[str]) -> dict[str, float]:
    """Trajectories a second, and CPU microseconds of each, of the process that only receives and acknowledges."""
    loop = subprocess.Popen([sys.executable, "-m", "experiments.bench", "broker", "--bare-loop", str(run.folder)])
    try:
        while not Path(run.place_of("trajectories").removeprefix("ipc://")).exists():
            time.sleep(0.1)  # importing

        cpu_begin = cpu_s = cpu_s_of(psutil.Process(loop.pid))
        child = subprocess.Popen([*producer, "--bare"], stdout=subprocess.PIPE, text=True)
        while child.poll() is None and loop.poll() is None:
            cpu_s = cpu_s_of(psutil.Process(loop.pid))
            time.sleep(0.05)

        assert child.stdout is not None
        produced = json.loads(child.stdout.read())
        return {"per_s": produced["per_s"], "cpu_us_per_trajectory": 1e6 * (cpu_s - cpu_begin) / produced["sent"]}
    finally:
        loop.kill()
        loop.wait()


def core_events_per_s(episodes: int = 100_000, live: int = 100_000) -> float:
    """Events per second of the core alone, with many live episodes (first token, usage, result per episode)."""
    groups = live // 16
    tune_memory()  # as the process does
    core = BrokerCore(Rules(steps=10**6, groups_per_batch=groups, group_size=8, train_tasks=1000, alpha=1))
    core.server_joined(0, 0, live, 0.0)
    issued = [a.ticket for a in core.published(Version(0, 0), 0.0) if isinstance(a, IssueTicket)]
    core.batch_requested(0, 0.0)
    events = step = taken = 0
    begin = time.perf_counter()

    while taken < episodes:
        ticket = issued[taken]
        taken += 1
        core.first_token(ticket.ticket_id, ticket.version, 0.0)
        core.usage(ticket.ticket_id, 10, False, 0.0)
        actions = core.finished(ticket.ticket_id, EpisodeOutcome(0, ticket.version.n, 1.0, 10), 0.0)
        events += 3

        if any(isinstance(action, EmitBatch) for action in actions):
            step += 1
            actions = [*actions, *core.published(Version(0, step), 0.0), *core.batch_requested(step, 0.0)]
            events += 2

        issued += [a.ticket for a in actions if isinstance(a, IssueTicket)]

    return events / (time.perf_counter() - begin)


def _of_one(found: list[dict[str, float]]) -> list[Timing]:
    """Seconds of one trajectory."""
    return [Timing(1 / each["per_s"], 1e-6 * each["cpu_us_per_trajectory"]) for each in found]


def main(argv: list[str]) -> None:
    parser = parser_of("broker", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--produce", metavar="RUN", help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bare-loop", metavar="RUN", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)

    if options.produce:
        return produce(RunFile.load(options.produce), options.seconds, options.tokens, options.bare)
    if options.bare_loop:
        return bare_loop(RunFile.load(options.bare_loop))

    def producer(run: RunFile) -> list[str]:
        amount = ["--seconds", str(options.seconds), "--tokens", str(options.tokens)]
        return [sys.executable, "-m", "experiments.bench", "broker", "--produce", str(run.folder), *amount]

    found: dict[str, list[dict[str, float]]] = {"broker": [], "bare_pull": []}
    with Idle() as idle:
        for _ in range(options.rounds):
            with temporary_run(SETTINGS) as run:
                found["bare_pull"].append(measure_limit(run, producer(run)))
            with temporary_run(SETTINGS) as run:
                found["broker"].append(serve_broker(run, producer(run)))

    ratio = ratio_of(_of_one(found["broker"]), _of_one(found["bare_pull"]))
    result: dict[str, Any] = {
        "trajectory_bytes": 13 * options.tokens,
        "broker": {name: statistics.median(each[name] for each in found["broker"]) for name in found["broker"][0]},
        "bare_pull": {name: statistics.median(each[name] for each in found["bare_pull"]) for name in ("per_s",)},
        "seconds_of_one": str(ratio),
        "core_events_per_s": round(core_events_per_s()),
        "refusal": idle.refusal(options.rounds),
    } | provenance(idle, {"broker_over_bare_pull": ratio})

    print(json.dumps(result, indent=2))
    write(options.out, result)
