"""The proxy process over real sockets: addresses, payloads, a generator's death, and what is no message at all."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from experiments.bench._inbox import receive_from
from rl.wire.messages import (
    Abort,
    FirstToken,
    Generate,
    Generated,
    GeneratorHello,
    GeneratorStatus,
    Grown,
    Heartbeat,
    Message,
    PeerDied,
    StillSampling,
    Stop,
    Usage,
    Version,
    encode,
)
from rl.wire.run import RunFile
from rl.wire.sockets import identity, open_socket, send, send_to
from tests.conftest import MakeRun
from tests.inbox import next_from
from tests.rollout.trajectories import reply_columns

PROXY = identity("proxy", 0)


def poll(socket: zmq.SyncSocket, seconds: float = 120) -> None:
    assert socket.poll(int(1000 * seconds)), "nothing arrived"


class Outside:
    """All the proxy's neighbours: supervisor, broker, one client, and generators as asked for."""

    def __init__(self, run: RunFile) -> None:
        self.run = run
        self.context = zmq.Context()
        self.control = open_socket(zmq.ROUTER, run, "control", bind=True, context=self.context)
        self.usage = open_socket(zmq.ROUTER, run, "usage", bind=True, context=self.context)
        command = [sys.executable, "-m", "rollout.proxy.process", "--run", str(run.folder)]
        self.process = subprocess.Popen(command)
        poll(self.control)
        receive_from(self.control)  # it has registered
        self.client = self.connect("frontend", identity("env_server", 0))

    def connect(self, name: str, me: bytes) -> zmq.SyncSocket:
        return open_socket(zmq.DEALER, self.run, name, identity=me, context=self.context)

    def generator(self, index: int, incarnation: int = 0, seats: int = 8) -> zmq.SyncSocket:
        socket = self.connect("backend", identity("generator", index, incarnation))
        send(socket, GeneratorHello(index, incarnation, 1000, seats, 500, Version(0, 0)))
        return socket

    def heartbeat(self) -> Heartbeat:
        """The next one that was sent after this call."""
        while self.control.poll(0):
            receive_from(self.control)
        for _ in range(2):
            poll(self.control)
            _, message = receive_from(self.control)
        assert isinstance(message, Heartbeat)
        return message

    def until(self, wanted: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """The statistics, once they are as wanted: messages of another peer may still be on their way."""
        deadline = time.monotonic() + 120
        while not wanted(stats := self.heartbeat().stats):
            assert time.monotonic() < deadline, stats
        return stats

    def close(self) -> None:
        send_to(self.control, PROXY, Stop("test over"))
        try:
            assert self.process.wait(timeout=240) == 0
        finally:
            self.process.kill()
            self.context.destroy(linger=0)


@pytest.fixture
def outside(make_run: MakeRun) -> Iterator[Outside]:
    world = Outside(make_run("timeouts.heartbeat_s=0.1", "env.servers=2", "generator.count=4"))
    yield world
    world.close()


def request(request_id: int, session: int = 1, prompt: int = 20, kind: str = "train") -> Generate:
    return Generate(
        request_id, session, kind, Version(0, 3), np.arange(prompt, dtype="<i4"), 30, 1.0, 1.0, [2], priority=4
    )


def answer(key: int, session: int, tokens: int, reason: str = "stop") -> Generated:
    return Generated(
        request_id=key,
        session=session,
        columns=reply_columns(range(tokens), -0.5, 3),
        timeline=0,
        finish_reason=reason,
        tokens_generated=tokens,
        generator=0,
    )


def get(socket: zmq.SyncSocket, kind: type) -> Message:
    came = next_from(socket, 120)
    assert came is not None, "nothing arrived"
    assert isinstance(came[1], kind), came[1]
    return came[1]


def test_requests_and_answers_cross_unchanged_but_for_the_request_id(outside: Outside) -> None:
    generator = outside.generator(0)
    other = outside.connect("frontend", identity("env_server", 1))
    for socket, session in ((outside.client, 70), (other, 71)):
        send(socket, request(5, session))  # equal ids of different clients
    arrived = [get(generator, Generate) for _ in range(2)]

    assert {each.session for each in arrived} == {70, 71}  # type: ignore[union-attr]
    for each in arrived:
        assert isinstance(each, Generate)
        assert (each.version, each.max_tokens, each.stop_token_ids, each.priority) == (Version(0, 3), 30, [2], 4)
        np.testing.assert_array_equal(each.prompt_ids, np.arange(20))
        send(generator, FirstToken(each.request_id, each.session, Version(0, 4)))
        send(generator, answer(each.request_id, each.session, tokens=each.session - 65))

    for socket, session in ((outside.client, 70), (other, 71)):
        reply = get(socket, Generated)
        assert isinstance(reply, Generated)
        assert (reply.request_id, reply.session, reply.finish_reason) == (5, session, "stop")
        np.testing.assert_array_equal(reply.token_ids, np.arange(session - 65))
        np.testing.assert_array_equal(reply.logp_behavior, np.full(session - 65, -0.5, np.float32))
        np.testing.assert_array_equal(reply.policy_version, np.full(session - 65, 3))

    reports = [get(outside.usage, FirstToken | Usage) for _ in range(4)]  # type: ignore[arg-type]
    firsts = {(each.session, each.version) for each in reports if isinstance(each, FirstToken)}
    assert firsts == {(70, Version(0, 4)), (71, Version(0, 4))}
    assert {(each.session, each.tokens, each.lost) for each in reports if isinstance(each, Usage)} == {
        (70, 5, False),
        (71, 6, False),
    }


def test_the_broker_hears_that_an_answer_grows_and_not_that_it_stands_still(outside: Outside) -> None:
    """A batch may wait for one long answer alone, of which nothing else is heard until it ends."""
    generator = outside.generator(0)
    send(outside.client, request(1, session=9))
    key = get(generator, Generate).request_id  # type: ignore[union-attr]
    for tokens in (4, 4, 9, 9):
        send(generator, GeneratorStatus(0, 0, Version(0, 3), {key: tokens}))
    send(generator, answer(key, 9, tokens=12))
    assert [get(outside.usage, StillSampling | Usage) for _ in range(3)] == [  # type: ignore[arg-type]
        StillSampling(),
        StillSampling(),
        Usage(9, 12, lost=False),
    ]


def test_a_dead_generator_s_requests_are_sent_to_another(outside: Outside) -> None:
    first = outside.generator(0)
    send(outside.client, request(1, session=9))
    key = get(first, Generate).request_id  # type: ignore[union-attr]
    grown = {key: (0, reply_columns(range(50, 57), -0.25, 4))}
    send(first, GeneratorStatus(0, 0, Version(0, 3), {key: 11}, grown))
    outside.heartbeat()  # the status has been read

    second = outside.generator(1)
    first.close()
    outside.heartbeat()
    assert next_from(second, 0.2) is None, "nothing is sent again on a suspicion"
    send_to(outside.control, PROXY, PeerDied("generator", 0, 0))

    again = get(second, Generate)
    assert isinstance(again, Generate) and again.request_id == key
    np.testing.assert_array_equal(again.prompt_ids, [*range(20), *range(50, 57)])
    assert (again.max_tokens, again.version) == (23, Version(0, 4))
    assert get(outside.usage, StillSampling) == StillSampling()
    assert get(outside.usage, Usage) == Usage(9, 7, lost=False)
    assert get(outside.usage, Usage) == Usage(9, 4, lost=True)

    send(second, answer(key, 9, tokens=3))
    reply = get(outside.client, Generated)
    assert isinstance(reply, Generated) and (reply.request_id, reply.tokens_generated) == (1, 10)
    assert reply.token_ids.tolist() == [*range(50, 57), 0, 1, 2]
    assert get(outside.usage, Usage) == Usage(9, 3, lost=False)


def test_who_reads_along_sees_one_response_over_the_death_of_its_generator(outside: Outside) -> None:
    first = outside.generator(0)
    send(outside.client, replace(request(1, session=9), stream=True))
    send(outside.client, request(2, session=10))
    keys = [get(first, Generate).request_id for _ in range(2)]  # type: ignore[union-attr]
    send(first, Grown({key: (0, reply_columns([50, 51], -0.25, 4)) for key in keys}))
    send(first, Grown({keys[0]: (2, reply_columns([52], -0.25, 4))}))

    def read() -> dict[int, tuple[int, list[int]]]:
        message = get(outside.client, Grown)
        assert isinstance(message, Grown)
        return {key: (place, columns["token_ids"].tolist()) for key, (place, columns) in message.requests.items()}

    assert [read(), read()] == [{1: (0, [50, 51])}, {1: (2, [52])}]
    first.close()
    send_to(outside.control, PROXY, PeerDied("generator", 0, 0))
    second = outside.generator(1)
    prompts = {each.session: each.prompt_ids for each in (get(second, Generate) for _ in range(2))}  # type: ignore[union-attr]
    assert prompts[9].tolist() == [*range(20), 50, 51, 52], "what was read is not sampled again"

    send(second, Grown({keys[0]: (0, reply_columns([60, 61], -0.25, 4))}))
    assert read() == {1: (3, [60, 61])}
    send(second, answer(keys[0], 9, tokens=3))
    reply = get(outside.client, Generated)
    assert isinstance(reply, Generated) and reply.token_ids.tolist()[:3] == [50, 51, 52]


def test_abort_queued_and_in_flight(outside: Outside) -> None:
    generator = outside.generator(0, seats=1)
    send(outside.client, request(1))
    key = get(generator, Generate).request_id  # type: ignore[union-attr]
    send(outside.client, request(2))
    send(outside.client, Abort(2))

    queued = get(outside.client, Generated)
    assert isinstance(queued, Generated)
    assert (queued.request_id, queued.finish_reason, queued.tokens_generated) == (2, "abort", 0)

    send(outside.client, Abort(1))
    assert get(generator, Abort) == Abort(key)
    send(generator, answer(key, 1, tokens=4, reason="abort"))
    running = get(outside.client, Generated)
    assert isinstance(running, Generated) and running.token_ids.size == 4


def test_a_dead_client_s_requests_are_aborted(outside: Outside) -> None:
    generator = outside.generator(0)
    send(outside.client, request(1, session=4))
    key = get(generator, Generate).request_id  # type: ignore[union-attr]
    outside.client.close()
    send_to(outside.control, PROXY, PeerDied("env_server", 0, 0))
    assert get(generator, Abort) == Abort(key)
    send(generator, answer(key, 4, tokens=6, reason="abort"))
    assert get(outside.usage, Usage) == Usage(4, 6, lost=False)


def test_what_is_no_message_is_counted_and_the_rest_goes_on(outside: Outside) -> None:
    generator = outside.generator(0)
    header, prompt = encode(request(1))
    bad: list[list[bytes | memoryview]] = [
        [b""],
        [b"\xc1garbage"],
        [header],  # its array is missing
        [header, bytes(prompt)[:-1]],
        [bytes(header)[:-3], prompt],
        list(encode(PeerDied("generator", 0, 0))),  # not a client's to say
    ]

    for frames in bad:
        outside.client.send_multipart(frames)
    stranger = outside.connect("backend", b"stranger")
    send(stranger, answer(1, 1, 1))

    send(outside.client, request(7, prompt=480))  # can never fit
    refused = get(outside.client, Generated)
    assert isinstance(refused, Generated)
    assert refused.finish_reason == "error" and "max_model_len of 500" in refused.error
    send(outside.client, request(8))
    assert isinstance(get(generator, Generate), Generate)

    stats = outside.until(lambda stats: stats["malformed"] > len(bad))  # the stranger comes on a way of its own
    assert stats["malformed"] == len(bad) + 1
    assert (stats["in_flight"], stats["queue_depth"], stats["live.0"], stats["kv_reserved.0"]) == (1, 0, 1, 50)


def test_it_stays_small_and_without_torch(outside: Outside) -> None:
    with open(f"/proc/{outside.process.pid}/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    assert resident < 150_000  # kB
    with open(f"/proc/{outside.process.pid}/maps") as maps:
        assert "libtorch" not in maps.read()
