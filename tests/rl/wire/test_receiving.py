"""The one receive loop: order, bounded turns, and what becomes of what is no message."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator

import pytest
import zmq

from experiments.bench._inbox import receive_all, receive_from
from experiments.chaos.inject import cut_connection
from rl.wire.messages import BatchRequest, Message, ProtocolError, Stop, encode
from rl.wire.receiving import MESSAGES_PER_TURN, Malformed, Port, Receiver
from rl.wire.sockets import _TOGETHER, open_socket, send, send_all
from tests.conftest import MakeRun


class Pair:
    """Both ends of an in-process DEALER-ROUTER (or PUSH-PULL) connection."""

    def __init__(self, context: zmq.SyncContext, name: str, kinds: tuple[int, int] = (zmq.DEALER, zmq.ROUTER)) -> None:
        self.there = context.socket(kinds[0])
        self.here = context.socket(kinds[1])
        if kinds[0] == zmq.DEALER:
            self.there.setsockopt(zmq.IDENTITY, b"peer")
        self.here.bind(f"inproc://{name}")
        self.there.connect(f"inproc://{name}")


@pytest.fixture
def context() -> Iterator[zmq.SyncContext]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_sockets_are_drained_in_their_order_and_in_bounded_turns(context: zmq.SyncContext) -> None:
    first = Pair(context, "first")
    second = Pair(context, "second", (zmq.PUSH, zmq.PULL))
    taken: list[tuple[str, int, bytes]] = []

    def handle(name: str, message: Message, peer: bytes) -> None:
        assert isinstance(message, BatchRequest)
        taken.append((name, message.step, peer))

    handlers = {
        first.here: lambda message, peer: handle("first", message, peer),
        second.here: lambda message, peer: handle("second", message, peer),
    }
    receiver: Receiver[Message] = Receiver(handlers, Malformed("test"), limit=2)
    for step in range(3):
        send(second.there, BatchRequest(step))
        send(first.there, BatchRequest(step))

    assert receiver.wait(60)
    receiver.drain()
    assert taken == [("first", 0, b"peer"), ("first", 1, b"peer"), ("second", 0, b""), ("second", 1, b"")]
    receiver.drain()
    assert taken[4:] == [("first", 2, b"peer"), ("second", 2, b"")]
    assert not receiver.wait(0)


def test_the_wait_ends_when_the_descriptor_is_readable(context: zmq.SyncContext) -> None:
    wake_fd = os.eventfd(1, os.EFD_NONBLOCK)
    receiver: Receiver[Message] = Receiver(
        {Pair(context, "quiet").here: lambda message, peer: None}, Malformed("test"), wake_fd
    )
    assert receiver.wait(60)
    os.eventfd_read(wake_fd)
    assert not receiver.wait(0.01)
    os.close(wake_fd)


def refuse(message: Message, peer: bytes) -> None:
    raise ProtocolError(f"{type(message).__name__} makes no sense from {peer!r}")


def test_what_is_no_message_is_counted_and_logged_at_a_limited_rate(
    context: zmq.SyncContext, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(context, "bad")
    malformed = Malformed("broker")
    receiver = Receiver({pair.here: refuse}, malformed, limit=MESSAGES_PER_TURN)
    send(pair.there, Stop("x"))
    pair.there.send(b"\xc1garbage")
    receiver.drain()
    assert malformed.count == 2
    refused, garbage = capsys.readouterr().err.splitlines()
    assert refused == "broker: dropped message 1: Stop makes no sense from b'peer'"
    assert garbage.startswith("broker: dropped message 2: not a message")

    for _ in range(1998):
        malformed(ProtocolError("again " * 100))
    (line,) = capsys.readouterr().err.splitlines()
    assert malformed.count == 2000 and len(line) < 350

    later = time.monotonic() + 60
    monkeypatch.setattr(time, "monotonic", lambda: later)
    malformed(ProtocolError("again"))
    assert capsys.readouterr().err == "broker: dropped message 2001: again (and 1997 like it before)\n"


def test_an_error_of_a_handler_is_not_taken_for_an_empty_socket(context: zmq.SyncContext) -> None:
    pair = Pair(context, "full")

    def full(message: Message, peer: bytes) -> None:
        raise zmq.Again

    send(pair.there, Stop("x"))
    with pytest.raises(zmq.Again):
        Receiver({pair.here: full}, Malformed("broker")).drain()


def test_a_port_takes_all_that_arrives_and_reports_what_its_handler_raises(context: zmq.SyncContext) -> None:
    async def main() -> None:
        pair = Pair(context, "port", (zmq.DEALER, zmq.DEALER))
        malformed = Malformed("generator")
        steps: list[int] = []
        failures: list[Exception] = []
        done = asyncio.Event()

        def handle(message: Message, peer: bytes) -> None:
            if isinstance(message, Stop):
                done.set()
            elif isinstance(message, BatchRequest) and message.step < 0:
                raise RuntimeError("negative")
            else:
                assert isinstance(message, BatchRequest)
                steps.append(message.step)

        for step in range(300):  # before the port is made, and while it is there
            send(pair.there, BatchRequest(step))
        port = Port(pair.here, handle, malformed, failures.append)
        for step in (300, -1, 301):
            send(pair.there, BatchRequest(step))
        pair.there.send(b"\xc1garbage")
        pair.there.send_multipart(encode(Stop("all is said")))

        await asyncio.wait_for(done.wait(), 60)
        assert steps == list(range(302)) and malformed.count == 1
        assert [str(failure) for failure in failures] == ["negative"]
        port.close()

    asyncio.run(main())


def test_what_a_port_sends_in_one_turn_goes_as_one_and_in_order(context: zmq.SyncContext) -> None:
    async def main() -> None:
        pair = Pair(context, "together")
        send(pair.there, BatchRequest(0))
        peer, _ = receive_from(pair.here) if pair.here.poll(60_000) else (b"", None)
        failures: list[Exception] = []
        port = Port(pair.there, lambda message, peer: None, Malformed("test"), failures.append)

        many = [BatchRequest(step) for step in range(_TOGETHER + 3)]
        for message in many:
            port.send(message)
        await asyncio.sleep(0)
        port.send(Stop("a turn later"))
        port.close()  # with what has not left yet

        came = []
        for size in (_TOGETHER, 3, 1):
            assert pair.here.poll(60_000)
            together = receive_all(pair.here)
            assert len(together) == size and {sender for sender, _ in together} == {peer}
            came += [message for _, message in together]
        assert came == [*many, Stop("a turn later")] and not failures

    asyncio.run(main())


def test_a_message_that_makes_no_sense_does_no_harm_to_those_that_came_with_it(context: zmq.SyncContext) -> None:
    pair = Pair(context, "neighbours")
    malformed = Malformed("test")
    taken: list[int] = []

    def handle(message: Message, peer: bytes) -> None:
        assert isinstance(message, BatchRequest)
        if message.step == 1:
            raise ProtocolError("no sense")
        taken.append(message.step)

    receiver = Receiver({pair.here: handle}, malformed)
    send_all(pair.there, [BatchRequest(step) for step in range(4)])
    assert receiver.wait(60)
    receiver.drain()
    assert taken == [0, 2, 3] and malformed.count == 1


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_a_connection_that_was_made_again_is_told_once(
    make_run: MakeRun, context: zmq.SyncContext, in_a_loop: bool, only_new_connections: None
) -> None:
    run = make_run()
    there = open_socket(zmq.ROUTER, run, "steps", bind=True, context=context)
    here = open_socket(zmq.DEALER, run, "steps", identity=b"learner.0.0", context=context)
    told: list[int] = []

    def ignore(message: Message, peer: bytes) -> None:
        pass

    def cut(step: int) -> None:
        send(here, BatchRequest(step))
        assert there.poll(60_000) and receive_from(there) == (b"learner.0.0", BatchRequest(step))
        assert cut_connection(os.getpid(), random.Random(0))

    async def in_asyncio() -> None:
        port = Port(here, ignore, Malformed("test"), lambda error: None, again=lambda: told.append(1))
        for step in range(3):
            cut(step)
            while len(told) == step:
                await asyncio.sleep(0.01)
        port.close()

    if in_a_loop:
        asyncio.run(asyncio.wait_for(in_asyncio(), 120))
    else:
        receiver = Receiver({here: ignore}, Malformed("test"), again={here: lambda: told.append(1)})
        for step in range(3):
            cut(step)
            while len(told) == step:
                assert receiver.wait(60)
                receiver.drain()
    assert len(told) == 3


def test_a_port_whose_peer_died_never_meets_its_successor(make_run: MakeRun, context: zmq.SyncContext) -> None:
    """Two connections in one name would take each other's answers. Many times: a close that is only asked for
    loses the race against a connection that is being tried again in one of twenty."""

    async def leave(address: str) -> None:
        socket = context.socket(zmq.DEALER)
        socket.linger = 500
        socket.reconnect_ivl = 1
        socket.connect(address)
        port = Port(socket, lambda message, peer: None, Malformed("test"), lambda error: None)
        send(socket, Stop("for the one that died"))  # at once: what a port has not sent yet never meets anybody
        port.close(peer_died=True)

    folder = make_run().folder  # of a short path
    successors = []
    for attempt in range(100):
        address = f"ipc://{folder}/died{attempt}"
        asyncio.run(leave(address))
        successor = context.socket(zmq.ROUTER)
        successor.bind(address)
        successors.append(successor)

    time.sleep(0.1)
    assert not any(successor.poll(0) for successor in successors)
