"""Sockets that find each other by name: before, after and while the process behind a name changes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import zmq

from experiments.bench._inbox import receive_from
from rl.wire.addresses import Addresses
from rl.wire.messages import BatchRequest, Message, PeerDied, PeerListens
from rl.wire.receiving import Malformed, Receiver
from rl.wire.run import RunFile
from rl.wire.sockets import made_again, open_socket, send
from tests.conftest import MakeRun

WAIT_MS = 60_000


@pytest.fixture
def context() -> Iterator[zmq.SyncContext]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def run(make_run: MakeRun) -> RunFile:
    return make_run("network.transport=tcp")


Broker = Callable[[str], tuple[zmq.SyncSocket, str]]


@pytest.fixture
def broker(run: RunFile, context: zmq.SyncContext) -> Broker:
    def bind(host: str) -> tuple[zmq.SyncSocket, str]:
        """The socket `steps` of another process, and where it is."""
        other = RunFile.load(run.folder)
        other.addresses.host = host
        steps = open_socket(zmq.ROUTER, other, "steps", bind=True, context=context)
        return steps, other.addresses.questions()[0]["steps"]

    return bind


def listens(incarnation: int, endpoint: str) -> PeerListens:
    return PeerListens("broker", 0, incarnation, {"steps": endpoint})


def arrives(steps: zmq.SyncSocket, *messages: Message) -> bool:
    return all(steps.poll(WAIT_MS) and receive_from(steps) == (b"learner.0.0", message) for message in messages)


def test_what_is_sent_before_anybody_knows_where_arrives_in_order(
    run: RunFile, context: zmq.SyncContext, broker: Broker
) -> None:
    learner = open_socket(zmq.DEALER, run, "steps", identity=b"learner.0.0", context=context)
    send(learner, BatchRequest(0))
    send(learner, BatchRequest(1))
    assert run.addresses.questions() == ({}, ["steps"])

    steps, endpoint = broker("127.0.0.1")
    assert not steps.poll(100)
    run.addresses.learn(listens(0, endpoint))
    send(learner, BatchRequest(2))
    assert arrives(steps, *map(BatchRequest, range(3)))


def test_a_receiver_connects_as_soon_as_it_is_told(run: RunFile, context: zmq.SyncContext, broker: Broker) -> None:
    learner = open_socket(zmq.DEALER, run, "steps", identity=b"learner.0.0", context=context)
    receiver = Receiver({learner: lambda *_: None}, Malformed("learner"))
    send(learner, BatchRequest(0))
    steps, endpoint = broker("127.0.0.1")
    run.addresses.learn(listens(0, endpoint))
    receiver.drain()
    assert arrives(steps, BatchRequest(0))


def test_a_successor_on_another_node_is_a_connection_made_again(
    run: RunFile, context: zmq.SyncContext, broker: Broker
) -> None:
    learner = open_socket(zmq.DEALER, run, "steps", identity=b"learner.0.0", context=context)
    steps, endpoint = broker("127.0.0.1")
    assert endpoint.startswith("tcp://127.0.0.1:")
    run.addresses.learn(listens(0, endpoint))
    send(learner, BatchRequest(0))
    assert arrives(steps, BatchRequest(0)) and not made_again(learner)

    steps.close(linger=0)
    run.addresses.forget(PeerDied("broker", 0, 0))
    send(learner, BatchRequest(1))  # to the dead one: lost
    steps, endpoint = broker("127.0.0.2")
    assert endpoint.startswith("tcp://127.0.0.2:")
    run.addresses.learn(listens(1, endpoint))
    send(learner, BatchRequest(2))
    assert arrives(steps, BatchRequest(2))
    assert made_again(learner)  # whoever owns it says again what it asks for


def test_a_new_socket_waits_for_the_successor(run: RunFile, context: zmq.SyncContext, broker: Broker) -> None:
    steps, endpoint = broker("127.0.0.1")
    run.addresses.learn(listens(0, endpoint))
    run.addresses.forget(PeerDied("broker", 0, 0))
    learner = open_socket(zmq.DEALER, run, "steps", identity=b"learner.0.0", context=context)
    send(learner, BatchRequest(0))
    assert not steps.poll(100)

    steps, endpoint = broker("127.0.0.1")
    run.addresses.learn(listens(1, endpoint))
    made_again(learner)
    assert arrives(steps, BatchRequest(0))


def test_the_death_of_an_earlier_one_or_of_another_takes_nothing_away() -> None:
    addresses = Addresses()
    addresses.learn(listens(1, "tcp://h:1"))
    for died in (PeerDied("broker", 0, 0), PeerDied("broker", 1, 1), PeerDied("proxy", 0, 1)):
        addresses.forget(died)
        assert addresses.find("steps") == "tcp://h:1"
    addresses.forget(PeerDied("broker", 0, 1))
    assert addresses.find("steps") is None


def test_over_ipc_nobody_is_asked(make_run: MakeRun, context: zmq.SyncContext) -> None:
    run = make_run()
    open_socket(zmq.ROUTER, run, "steps", bind=True, context=context)
    open_socket(zmq.DEALER, run, "steps", context=context)
    assert run.addresses.questions() == ({}, [])
