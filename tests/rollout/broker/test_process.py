"""The real broker process over ipc; the test plays supervisor, environment server, proxy and learner."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from experiments.bench._inbox import receive, receive_from
from rl.observe.trace import read_trace
from rl.observe.trace_events import Issued
from rl.store.batch_files import read_batch_parts, write_batch_part
from rl.wire.columns import register_configured
from rl.wire.messages import (
    NO_OPINION,
    AckTickets,
    AlarmRaised,
    BatchPart,
    BatchRequest,
    BatchUnderway,
    CancelTickets,
    Done,
    EvalRequest,
    Fatal,
    Journal,
    LongBatchPart,
    Message,
    Metrics,
    PeerDied,
    Published,
    Register,
    SaveRequest,
    ServerHello,
    StillCopying,
    StillSampling,
    Stop,
    Ticket,
    TicketCancelled,
    Trajectory,
    Usage,
    Version,
    encode,
)
from rl.wire.run import RunFile
from rl.wire.sockets import identity, open_socket, send, send_to
from rollout.broker import process
from rollout.broker.assembly import no_batch
from rollout.broker.records import State
from tests.conftest import MakeRun
from tests.inbox import next_from
from tests.reading import read_entries
from tests.rollout.broker import short_frames
from tests.rollout.trajectories import make_trajectory, with_sequence

DEADLINE_S = 120.0
NEVER = 999  # a ticket that the broker has not issued


class BrokerProcess:
    def __init__(self, run: RunFile, module: str = "rollout.broker.process") -> None:
        self.context = zmq.Context()
        self.run = run
        self.module = module
        self.seq: dict[int, int] = {}  # by incarnation of the environment server
        self.to_supervisor: list[Message] = []

        self.control = open_socket(zmq.ROUTER, run, "control", bind=True, context=self.context)
        self.batch_parts = [
            open_socket(zmq.ROUTER, run, "batches", rank, bind=True, context=self.context)
            for rank in range(run.config.learner.ranks)
        ]
        self.begin(0)
        self.connect()
        self.servers: dict[int, zmq.Socket[bytes]] = {}

    def connect(self) -> None:
        run = self.run
        self.learner = open_socket(zmq.DEALER, run, "steps", identity=identity("learner", 0), context=self.context)
        self.proxy = open_socket(zmq.DEALER, run, "usage", identity=identity("proxy", 0), context=self.context)
        self.results_of_each: dict[int, zmq.Socket[bytes]] = {}

    def results_of(self, incarnation: int) -> zmq.Socket[bytes]:
        if incarnation not in self.results_of_each:
            me = identity("env_server", 0, incarnation)
            opened = open_socket(zmq.DEALER, self.run, "trajectories", identity=me, context=self.context)
            self.results_of_each[incarnation] = opened
        return self.results_of_each[incarnation]

    @property
    def results(self) -> zmq.Socket[bytes]:
        return self.results_of(0)

    def begin(self, incarnation: int) -> None:
        command = [sys.executable, "-m", self.module, "--run", str(self.run.folder)]
        self.process = subprocess.Popen([*command, "--incarnation", str(incarnation)], stderr=subprocess.PIPE)
        self.await_control(Register)

    def replace(self, incarnation: int, capacity: int, held: list[Ticket]) -> None:
        """Kill it. Its peers meet the next incarnation over sockets of their own, and server 0 says what it holds.

        Returns when the broker has answered the hello, by taking back a ticket that never was: it knows the way.
        """
        self.process.kill()
        self.process.communicate()
        self.begin(incarnation)
        for socket in (self.learner, self.proxy, *self.results_of_each.values(), *self.servers.values()):
            socket.close(linger=0)
        self.connect()
        self.join(0, capacity, [ticket.ticket_id for ticket in held] + [NEVER], self.seq[0])
        while not isinstance(message := self.from_broker(), CancelTickets):
            pass
        assert message.ticket_ids == [NEVER]

    def join(self, incarnation: int, capacity: int, held: Sequence[int] = (), seq: int = 0) -> None:
        me = identity("env_server", 0, incarnation)
        self.servers[incarnation] = open_socket(zmq.DEALER, self.run, "tickets", identity=me, context=self.context)
        send(self.servers[incarnation], ServerHello(0, incarnation, capacity, tickets=list(held)))
        self.seq[incarnation] = seq

    def next_seq(self, incarnation: int = 0) -> int:
        self.seq[incarnation] += 1
        return self.seq[incarnation]

    def from_broker(self, incarnation: int = 0, timeout_s: float = DEADLINE_S) -> Message:
        return _next(self.servers[incarnation], timeout_s)

    def tickets(self, count: int, incarnation: int = 0) -> list[Ticket]:
        found: list[Ticket] = []
        while len(found) < count:
            message = self.from_broker(incarnation)
            if isinstance(message, Ticket):
                found.append(message)
        return found

    def acks(self, count: int, incarnation: int = 0) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            message = self.from_broker(incarnation)
            if isinstance(message, AckTickets):
                found += message.ticket_ids
        return found

    def deliver(self, ticket: Ticket, reward: float = 1.0, *, tokens: int = 4, incarnation: int = 0) -> Trajectory:
        trajectory = make_trajectory(ticket, self.next_seq(incarnation), reward, tokens, incarnation)
        send(self.results_of(incarnation), trajectory)
        if ticket.kind == "train":
            send(self.proxy, Usage(ticket.ticket_id, tokens))
        return trajectory

    def await_control(self, kind: type[Message]) -> Message:
        """The next message of this kind that the supervisor receives (heartbeats in between are dropped)."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            for message in self.to_supervisor:
                if isinstance(message, kind):
                    self.to_supervisor.remove(message)
                    return message
            if self.control.poll(100):
                self.to_supervisor.append(receive_from(self.control)[1])
        raise AssertionError(f"no {kind.__name__} in {DEADLINE_S} s; received {self.to_supervisor[-5:]}")

    def tell_broker(self, message: Message) -> None:
        send_to(self.control, identity("broker", 0), message)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.context.destroy(linger=0)


def _next(socket: zmq.Socket[bytes], timeout_s: float = DEADLINE_S) -> Message:
    came = next_from(socket, timeout_s)
    assert came is not None, "nothing arrived"
    return came[1]


@pytest.fixture
def broker(make_run: MakeRun, request: pytest.FixtureRequest, own_table: None) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(make_run(*request.param, train_tasks=10))
    register_configured(broker.run.config.algo.columns)
    yield broker
    broker.close()


BASE = ("steps=1", "rollout.alpha=0", "rollout.groups_per_batch=2", "rollout.group_size=2")


@pytest.mark.parametrize("broker", [(*BASE, "learner.ranks=2", "eval.tasks=2")], indirect=True)
def test_a_whole_run(broker: BrokerProcess) -> None:
    send(broker.learner, Published(Version(0, 0)))
    send(broker.learner, BatchRequest(0))
    broker.join(0, 8)
    tickets = broker.tickets(4)
    assert [t.sample_id for t in tickets] == [0, 1, 2, 3]

    first = broker.deliver(tickets[0])
    assert broker.acks(1) == [tickets[0].ticket_id]
    send(broker.results, first)  # as if the acknowledgement had been lost
    assert broker.acks(1) == [tickets[0].ticket_id]
    broker.results.send_multipart([b"\x93not a message"])
    broker.results.send_multipart([b""])
    send(broker.results, replace(make_trajectory(tickets[1], broker.next_seq(), 0.0), group_id=7))
    (tickets[1],) = broker.tickets(1)  # tried again
    for ticket, tokens in zip(tickets[1:], (9, 5, 3), strict=True):
        broker.deliver(ticket, reward=0.0, tokens=tokens)

    received = [_next(socket) for socket in broker.batch_parts]
    batch_parts = [batch_part for batch_part in received if isinstance(batch_part, BatchPart)]
    assert len(batch_parts) == len(received) == 2
    rows = batch_parts[0].rows
    assert rows == batch_parts[1].rows and [row.sample_id for row in rows] == [0, 1, 2, 3]
    assert [row.tokens for row in rows] == [6, 11, 7, 5]
    assert [batch_part.members for batch_part in batch_parts] == [[1, 3], [0, 2]]  # 11 + 5 against 7 + 6: longest first
    assert [batch_part.lengths for batch_part in batch_parts] == [[11, 5], [6, 7]]
    assert batch_parts[0].token_ids.tolist() == [11] * 11 + [13] * 5
    assert batch_parts[0].turn_starts == [[2], [2]]
    assert batch_parts[0].loss_tokens == 21

    send(broker.learner, BatchRequest(0))  # as a learner that starts again from a checkpoint
    assert [encode(_next(socket)) for socket in broker.batch_parts] == [
        encode(batch_part) for batch_part in batch_parts
    ]

    metrics = batch_parts[0].metrics
    assert metrics["rollout/reward"] == 0.25 and metrics["staleness/mean"] == 0 and metrics["env/legal"] == 1

    send(broker.learner, SaveRequest(Version(0, 1)))  # waits for the publication
    send(broker.learner, Published(Version(0, 1)))
    send(broker.learner, EvalRequest(Version(0, 1), 2))
    journal = _next(broker.learner)
    assert isinstance(journal, Journal) and msgspec.msgpack.decode(journal.state)["n"] == 1
    for ticket in broker.tickets(2):
        assert ticket.kind == "eval" and ticket.temperature == 0 and ticket.version == Version(0, 1)
        broker.deliver(ticket, reward=float(ticket.task_index))
    evaluation = broker.await_control(Metrics)
    assert isinstance(evaluation, Metrics) and evaluation.values["eval/accuracy"] == 0.5

    done = broker.await_control(Done)
    assert isinstance(done, Done)
    report = json.loads(done.report)
    samples = report["ledger"]["samples"]
    assert {state: count for state, count in samples.items() if count} == {"issued": 4, "trained": 4}
    assert report["refused_trajectories"] == 1
    assert len(samples) == 1 + len(State), "every state stands in the report"
    assert report["ledger"]["tokens"]["trained"] == report["ledger"]["tokens"]["generated"] == 21
    assert report["eval"]["last"]["versions"] == {"1": 2}
    broker.tell_broker(Stop("done"))
    assert broker.process.wait(60) == 0


def test_a_team_s_part_is_written_once_and_may_be_longer_than_a_frame(make_run: MakeRun) -> None:
    run = make_run(*BASE, "learner.ranks=4", "learner.context_parallel=2", train_tasks=10)
    with contextlib.closing(BrokerProcess(run, short_frames.__name__)) as broker:
        send(broker.learner, Published(Version(0, 0)))
        send(broker.learner, BatchRequest(0))
        broker.join(0, 8)
        for ticket in broker.tickets(4):
            broker.deliver(ticket)

        received = [_next(socket) for socket in broker.batch_parts]
        long = [message for message in received if isinstance(message, LongBatchPart)]
        assert len(long) == len(received)
        parts = [message.joined() for message in long]
        assert [part.rank for part in parts] == [0, 1, 2, 3]
        assert [part.members for part in parts] == [[0, 2], [0, 2], [1, 3], [1, 3]]
        for team in (parts[:2], parts[2:]):
            assert encode(replace(team[0], rank=team[1].rank)) == encode(team[1])

        written = sorted(path.name for path in (run.folder / "batches").iterdir())
        assert written == ["000000.0.msgpack", "000000.2.msgpack"]
        assert list(map(encode, read_batch_parts(run.folder))) == [encode(parts[0]), encode(parts[2])]
        send(broker.learner, BatchRequest(0))  # as a learner that starts again from a checkpoint
        assert [encode(_next(socket)) for socket in broker.batch_parts] == list(map(encode, received))


def test_each_part_that_is_read_again_is_progress(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them may be many gigabytes, and the disk slow."""
    run = make_run("learner.ranks=4", "learner.context_parallel=2")
    part = no_batch(3, 9, 0, 0)
    for rank in (0, 2):
        write_batch_part(run.folder, replace(part, rank=rank))

    told: list[tuple[int, int]] = []
    broker: Any = SimpleNamespace(config=run.config, process=SimpleNamespace(run=run, progress=0), batches=range(4))
    monkeypatch.setattr(process, "send", lambda rank, _: told.append((rank, broker.process.progress)))
    process.Broker._send_again(broker, 3, range(4))
    assert told == [(0, 0), (1, 0), (2, 1), (3, 1)] and broker.process.progress == 2


@pytest.mark.parametrize("broker", [(*BASE, "rollout.group_size=8")], indirect=True)
def test_rewards_that_fail_complete_their_groups_and_an_alarm_names_the_first(broker: BrokerProcess) -> None:
    """The sixth is more than 1 % of 500. A missing opinion is no failure, and nothing is tried again."""
    send(broker.learner, Published(Version(0, 0)))
    send(broker.learner, BatchRequest(0))
    broker.join(0, 16)
    tickets = broker.tickets(16)
    for place, ticket in enumerate(tickets):
        why = f"my_module:mine raised KeyError: {place}" if place < 6 else NO_OPINION if place < 8 else ""
        told = make_trajectory(ticket, broker.next_seq(), 1.0 if place == 9 else 0.0)
        send(broker.results, replace(told, unrewarded=why))
        send(broker.proxy, Usage(ticket.ticket_id, 4))

    alarm = broker.await_control(AlarmRaised)
    assert isinstance(alarm, AlarmRaised) and (alarm.who, alarm.name) == ("broker.0", "reward-failed")
    assert alarm.detail.startswith("6 of the last ") and alarm.detail.endswith("my_module:mine raised KeyError: 0")

    batch_part = _next(broker.batch_parts[0])
    assert isinstance(batch_part, BatchPart)
    assert [row.unrewarded for row in batch_part.rows] == [True] * 8 + [False] * 8
    assert (batch_part.metrics["reward/failed"], batch_part.metrics["reward/no_opinion"]) == (6, 2)
    assert batch_part.metrics["rollout/reward"] == 1 / 8


@pytest.mark.parametrize("broker", [BASE], indirect=True)
def test_a_dead_server_and_an_invalid_trajectory(broker: BrokerProcess) -> None:
    send(broker.learner, Published(Version(0, 0)))
    send(broker.learner, BatchRequest(0))
    broker.join(0, 4)
    lost = broker.tickets(4)
    broker.deliver(lost[0])
    broker.acks(1)
    broker.tell_broker(PeerDied("env_server", 0, 0))
    broker.join(1, 2)
    again = broker.tickets(2, 1)
    assert [(t.sample_id, t.attempt) for t in again] == [(1, 1), (2, 1)]
    assert [t.seed for t in again] == [t.seed for t in lost[1:3]]

    broken = with_sequence(
        make_trajectory(again[0], broker.next_seq(1), 1.0, incarnation=1), loss_mask=np.ones(3, np.uint8)
    )
    send(broker.results_of(1), broken)
    (retried,) = broker.tickets(1, 1)  # before the group that is still queued
    assert (retried.sample_id, retried.attempt) == (1, 2)

    send(broker.results, make_trajectory(lost[3], 2, 1.0))  # of the dead incarnation: dropped
    result_seq = broker.seq[1] + 1
    cancelled_seq = broker.seq[1] + 2
    send(broker.servers[1], TicketCancelled(0, 1, cancelled_seq, retried.ticket_id))  # overtakes a result
    assert broker.from_broker(1) == AckTickets([broken.ticket_id])
    assert next_from(broker.servers[1], 0.2) is None, "a message is handled only when all before it are"

    send(broker.results_of(1), make_trajectory(again[1], result_seq, 1.0, incarnation=1))
    following = broker.tickets(
        2, 1
    )  # sample 1 has failed three times: its group is given up, the next one takes its place
    assert [(t.sample_id, t.attempt) for t in following] == [(3, 1), (4, 0)]


@pytest.mark.parametrize("broker", [(*BASE, "learner.batch_deadline_s=0.5")], indirect=True)
def test_the_watchdog_says_who_waits_for_whom(broker: BrokerProcess) -> None:
    send(broker.learner, Published(Version(0, 0)))
    broker.join(0, 4)
    broker.tickets(4)
    send(broker.learner, BatchRequest(0))
    fatal = broker.await_control(Fatal)
    assert isinstance(fatal, Fatal)
    assert "learner.0 waited for the broker's batch 0, and for 0.5 s no answer began, grew or ended" in fatal.message
    assert "4 episodes of the environment servers (0 of 2 groups ready)" in fatal.message
    assert '"running": 4' in fatal.detail
    assert broker.process.wait(60) == 1


@pytest.mark.parametrize("broker", [(*BASE, "learner.batch_deadline_s=3")], indirect=True)
@pytest.mark.parametrize("sampled", [Usage(0, 1), StillSampling()], ids=["answers end", "one answer grows"])
def test_a_batch_that_comes_nearer_may_take_longer_than_its_deadline(broker: BrokerProcess, sampled: Message) -> None:
    """Tokens are sampled for longer, and the learner, whose deadline is the same, hears of it meanwhile."""
    send(broker.learner, Published(Version(0, 0)))
    broker.join(0, 4)
    tickets = broker.tickets(4)
    send(broker.learner, BatchRequest(0))

    heard: list[Message] = []
    began = time.monotonic()
    while time.monotonic() < began + 5:
        send(broker.proxy, replace(sampled, session=tickets[0].ticket_id) if isinstance(sampled, Usage) else sampled)
        if broker.batch_parts[0].poll(100):
            heard.append(receive(broker.batch_parts[0]))
    assert len(heard) > 1 and set(heard) == {BatchUnderway(0)}

    for ticket in tickets:
        broker.deliver(ticket, float(ticket.sample_id % 2))
    while not isinstance(batch_part := _next(broker.batch_parts[0]), BatchPart):
        pass
    assert batch_part.step == 0


@pytest.mark.parametrize("broker", [(*BASE, "learner.batch_deadline_s=3")], indirect=True)
def test_nobody_gives_up_while_what_an_engine_needs_is_being_copied(broker: BrokerProcess) -> None:
    send(broker.learner, Published(Version(0, 0)))
    broker.join(0, 4)
    tickets = broker.tickets(4)
    send(broker.learner, BatchRequest(0))

    heard: list[Message] = []
    began = time.monotonic()
    while time.monotonic() < began + 5:
        send_to(broker.control, identity("broker", 0), StillCopying())
        if broker.batch_parts[0].poll(100):
            heard.append(receive(broker.batch_parts[0]))
    assert len(heard) > 1 and set(heard) == {BatchUnderway(0)}

    for ticket in tickets:
        broker.deliver(ticket, float(ticket.sample_id % 2))
    while not isinstance(batch_part := _next(broker.batch_parts[0]), BatchPart):
        pass
    assert batch_part.step == 0


@pytest.mark.parametrize("broker", [(*BASE, "algo.columns=[tests.reading:READ]")], indirect=True)
def test_a_broker_that_is_killed_with_large_columns_trains_the_same_batch(broker: BrokerProcess) -> None:
    """After each trajectory: its successors have the earlier ones in their first states, and read them there."""
    send(broker.learner, Published(Version(0, 0)))
    broker.join(0, 4)
    tickets = broker.tickets(4)
    sent = []
    for number, ticket in enumerate(tickets):
        trajectory = make_trajectory(ticket, broker.next_seq(), float(number % 2), 200 + number)
        trajectory = with_sequence(trajectory, read=read_entries(trajectory.sequence.token_ids + np.int32(number)))
        sent.append(trajectory)
        send(broker.results, trajectory)
        assert broker.acks(1) == [ticket.ticket_id]

        broker.replace(number + 1, 4, tickets[number + 1 :])
        beside = [path.stat().st_size for path in broker.run.folder.glob("broker.columns.*")]
        assert len(beside) == 1 and beside[0] >= sum(each.sequence.columns["read"].nbytes for each in sent)
        assert (broker.run.folder / "broker.log").stat().st_size < 40_000, "48 numbers a token are not in it"

    send(broker.learner, BatchRequest(0))
    while not isinstance(batch_part := _next(broker.batch_parts[0]), BatchPart):
        pass
    assert [row.sample_id for row in batch_part.rows] == [0, 1, 2, 3]
    for name in ("token_ids", "loss_mask", "policy_version", "read"):
        expected = np.concatenate([each.sequence.columns[name] for each in sent])
        np.testing.assert_array_equal(batch_part.columns[name], expected)


@pytest.mark.parametrize("broker", [(*BASE, "rollout.redundant_episodes=1")], indirect=True)
def test_redundant_episodes_are_cancelled(broker: BrokerProcess) -> None:
    send(broker.learner, Published(Version(0, 0)))
    broker.join(0, 6)
    tickets = broker.tickets(6)
    broker.deliver(tickets[0])
    broker.deliver(tickets[2])
    while not isinstance(message := broker.from_broker(), CancelTickets):
        pass
    assert message.ticket_ids == [tickets[1].ticket_id]


@pytest.mark.parametrize("broker", [BASE], indirect=True)
def test_a_successor_tells_the_trace_what_is_missing_and_nothing_twice(broker: BrokerProcess) -> None:
    """The broker died after its log had the events of a turn, and before it had told all of them."""
    send(broker.learner, Published(Version(0, 0)))
    broker.join(0, 4)
    issued = [ticket.ticket_id for ticket in broker.tickets(4)]
    broker.process.kill()
    broker.process.communicate()

    path = broker.run.folder / "trace" / "broker.0.0.trace"
    assert _told(broker.run) == issued
    path.write_bytes(path.read_bytes()[:-30])  # the last record and a part of the one before
    assert _told(broker.run) == issued[:2]

    broker.begin(1)
    deadline = time.monotonic() + DEADLINE_S
    while len(_told(broker.run)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _told(broker.run) == issued


def _told(run: RunFile) -> list[int]:
    """The tickets of which the trace says that they were issued."""
    return [record.event.ticket for record in read_trace(run.folder) if isinstance(record.event, Issued)]
