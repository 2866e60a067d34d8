"""The generator process over real sockets and shared memory, with the simulated engine; the tests are its peers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pytest
import zmq

from rl.weights import make_sender
from rl.weights.channel import Entry, Piece, Placement
from rl.wire.messages import (
    Abort,
    Fatal,
    FirstToken,
    Generate,
    Generated,
    GeneratorHello,
    GeneratorStatus,
    Grown,
    Heartbeat,
    Message,
    Stop,
    Version,
    WeightNotice,
    WeightStatus,
)
from rl.wire.run import RunFile
from rl.wire.sockets import identity, open_socket, send, send_to
from rollout.generator.jobs import DELIVERED_EVERY
from tests.conftest import MakeRun
from tests.inbox import next_from

ME = identity("generator", 0, 2)
ENTRY: Entry = ("weight", (64,), "float32")
SETTINGS = (
    "generator.engine=simulated",
    "generator.options.decode_base_s=0.002",
    "generator.options.length_mean=100",
    "generator.options.length_sigma=0",
    "timeouts.heartbeat_s=0.1",
    "weights.deadline_s=60",
)


class Outside:
    """Supervisor, proxy and learner of one generator, incarnation 2."""

    def __init__(self, run: RunFile, entries: Sequence[Entry] = (ENTRY,)) -> None:
        self.run = run
        self.context = zmq.Context()
        names = ("control", "backend", "weight_status")
        self.control, self.backend, self.status = (
            open_socket(zmq.ROUTER, run, name, bind=True, context=self.context) for name in names
        )
        self.notices = open_socket(zmq.DEALER, run, "notices", 0, identity=identity("learner", 0), context=self.context)
        self.sender = make_sender(run, 0, entries)
        self.sender.open()
        command = [sys.executable, "-m", "rollout.generator.process", "--run", str(run.folder), "--incarnation", "2"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE)

    def get(self, socket: zmq.SyncSocket, wanted: Callable[[Message], bool], seconds: float = 80) -> Message:
        """The next message that is wanted; heartbeats and the like pass by."""
        deadline = time.monotonic() + seconds
        while (came := next_from(socket, deadline - time.monotonic())) is not None:
            peer, message = came
            assert peer == ME
            if wanted(message):
                return message
        raise AssertionError(f"nothing wanted arrived in {seconds} s")

    def answer(self) -> Generated:
        message = self.get(self.backend, lambda message: isinstance(message, Generated))
        assert isinstance(message, Generated)
        return message

    def running(self, wanted: Callable[[dict[int, int]], bool]) -> GeneratorStatus:
        message = self.get(self.backend, lambda each: isinstance(each, GeneratorStatus) and wanted(each.running))
        assert isinstance(message, GeneratorStatus)
        return message

    def heartbeat(self, wanted: Callable[[Heartbeat], bool]) -> Heartbeat:
        message = self.get(self.control, lambda each: isinstance(each, Heartbeat) and bool(each.stats) and wanted(each))
        assert isinstance(message, Heartbeat)
        return message

    def publish(self, n: int, pieces: Iterable[Piece] | None = None) -> int | None:
        """The learner's version n; returns its checksum."""
        self.sender.offer(n, pieces or [("weight", np.full(64, n, np.float32), Placement((64,)))])
        receipt = self.sender.receipt(n)
        self.sender.announce(Version(0, n))
        return receipt

    def load(self, n: int) -> None:
        checksum = self.publish(n)
        send(self.notices, WeightNotice(Version(0, n), [1, 2, 3]))
        status = self.get(self.status, lambda each: isinstance(each, WeightStatus) and each.version.n == n)
        assert isinstance(status, WeightStatus)
        assert (status.generator, status.incarnation, status.checksum, status.error) == (0, 2, checksum, "")
        assert len(status.probe_logp) == 2

    def generate(
        self, request_id: int, gate: int, timeline: int = 0, max_tokens: int = 1000, stream: bool = False
    ) -> None:
        prompt = np.arange(30, dtype="<i4")
        gate_version = Version(timeline, gate)
        fields = (request_id, 70 + request_id, "train", gate_version, prompt, max_tokens, 1.0, 1.0, [2])
        send_to(self.backend, ME, Generate(*fields, stream=stream))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.sender.close()
        self.context.destroy(linger=0)


@pytest.fixture
def start(make_run: MakeRun) -> Iterator[Callable[..., Outside]]:
    worlds: list[Outside] = []

    def make(*overrides: str) -> Outside:
        world = Outside(make_run(*SETTINGS, *overrides))
        worlds.append(world)
        hello = world.get(world.backend, lambda each: isinstance(each, GeneratorHello))
        assert hello == GeneratorHello(0, 2, 64 * 2048, 64, 2048, Version(-1, -1))
        return world

    yield make
    for world in worlds:
        world.close()


def test_requests_wait_for_their_version_and_the_process_stops_cleanly(start: Callable[..., Outside]) -> None:
    outside = start()
    outside.generate(1, gate=0)
    outside.generate(2, gate=2)
    held = outside.heartbeat(lambda beat: beat.stats["held"] == 2)
    assert not held.busy, "a held request waits for the learner: no hang"

    outside.load(0)
    first = outside.get(outside.backend, lambda each: isinstance(each, FirstToken))
    assert first == FirstToken(1, 71, Version(0, 0))
    answer = outside.answer()
    assert (answer.request_id, answer.session, answer.generator, answer.timeline) == (1, 71, 0, 0)
    assert answer.finish_reason == "stop" and answer.tokens_generated == answer.token_ids.size == 100
    assert answer.queued_s > 0 and answer.generate_s >= 0.15

    outside.load(1)
    outside.heartbeat(lambda beat: beat.stats["version"] == 1 and beat.stats["held"] == 1)
    outside.load(3)
    assert set(outside.answer().policy_version.tolist()) == {3}
    beat = outside.heartbeat(lambda beat: beat.stats["running"] == 0 and beat.stats["tokens"] == 200)
    assert beat.stats["busy_s"] >= 0.3 and beat.stats["idle_s"] > 0 and beat.stats["loads"] == 3
    outside.generate(3, gate=3)
    outside.get(outside.backend, lambda each: isinstance(each, FirstToken) and each.request_id == 3)
    send_to(outside.control, ME, Stop("test over"))
    assert outside.process.wait(timeout=60) == 0
    assert outside.process.stderr is not None and outside.process.stderr.read() == b""


def test_versions_are_tagged_per_token_over_an_update(start: Callable[..., Outside]) -> None:
    outside = start("generator.on_update=keep", "generator.options.decode_base_s=0.03")
    outside.load(0)
    outside.generate(1, gate=0)
    outside.running(lambda running: running.get(1, 0) > 10)
    outside.load(1)
    versions = outside.answer().policy_version.tolist()
    assert versions == sorted(versions) and len(versions) == 100 and 10 < versions.count(0) < 100


def test_aborts_of_held_and_running_requests_answer_with_what_was_generated(start: Callable[..., Outside]) -> None:
    outside = start("generator.options.length_mean=1000", "generator.options.decode_base_s=0.03")
    outside.load(0)
    outside.generate(1, gate=1)
    send_to(outside.backend, ME, Abort(1))
    held = outside.answer()
    assert (held.request_id, held.finish_reason, held.tokens_generated, held.timeline) == (1, "abort", 0, 0)

    outside.generate(2, gate=0)
    outside.running(lambda running: running.get(2, 0) > 5)
    send_to(outside.backend, ME, Abort(2))
    running = outside.answer()
    assert running.finish_reason == "abort" and 5 < running.tokens_generated == running.logp_behavior.size < 1000

    outside.generate(3, gate=0)
    send_to(outside.backend, ME, Abort(3))  # at once: it may not have reached the engine
    assert outside.answer().finish_reason == "abort"
    send_to(outside.backend, ME, Abort(3))
    outside.load(1)  # the aborted request 1 is not run
    outside.heartbeat(lambda beat: beat.stats["version"] == 1 and beat.stats["running"] == beat.stats["held"] == 0)


def test_long_responses_are_delivered_while_they_grow_and_again_when_begun_again(start: Callable[..., Outside]) -> None:
    slow = ("generator.options.length_mean=3000", "generator.options.decode_base_s=0.006")
    outside = start(*slow, "generator.on_update=abort")

    def delivered() -> tuple[int, dict[str, np.ndarray]]:
        message = outside.get(outside.backend, lambda each: isinstance(each, GeneratorStatus) and bool(each.grown))
        assert isinstance(message, GeneratorStatus)
        return message.grown[1]

    outside.load(0)
    outside.generate(1, gate=0, max_tokens=2000)
    begin, first = delivered()
    place, second = delivered()
    assert begin == 0 and place == first["token_ids"].size >= DELIVERED_EVERY
    assert second["policy_version"].tolist() == [0] * second["token_ids"].size == [0] * second["logp_behavior"].size

    outside.load(1)
    while (again := delivered())[0]:
        pass  # was on its way
    assert set(again[1]["policy_version"].tolist()) == {1}


def test_a_client_that_reads_along_is_told_of_every_token_but_the_last_ones(start: Callable[..., Outside]) -> None:
    outside = start("generator.options.length_mean=300", "generator.options.decode_base_s=0.01")
    outside.load(0)
    outside.generate(1, gate=0, stream=True)
    outside.generate(2, gate=0)
    told: list[int] = []
    answers: dict[int, Generated] = {}
    while len(answers) < 2:
        message = outside.get(outside.backend, lambda each: isinstance(each, Generated | Grown))
        if isinstance(message, Grown):
            assert message.requests.keys() == {1} and 1 not in answers
            place, columns = message.requests[1]
            assert place == len(told) and columns["policy_version"].tolist() == [0] * columns["token_ids"].size
            told += columns["token_ids"].tolist()
        else:
            assert isinstance(message, Generated)
            answers[message.request_id] = message

    ids = answers[1].token_ids.tolist()
    assert told == ids[: len(told)] and 0 < len(told) < len(ids) == 300


def test_what_was_told_over_a_connection_that_broke_is_told_again(start: Callable[..., Outside]) -> None:
    outside = start("generator.options.length_mean=3000", "generator.options.decode_base_s=0.05")  # it goes on
    outside.load(0)
    outside.generate(1, gate=0, max_tokens=2000, stream=True)

    def grown() -> tuple[int, list[int]]:
        message = outside.get(outside.backend, lambda each: isinstance(each, Grown))
        assert isinstance(message, Grown)
        place, columns = message.requests[1]
        return place, columns["token_ids"].tolist()

    _, before = grown()
    outside.backend.close(linger=0)
    outside.backend = open_socket(zmq.ROUTER, outside.run, "backend", bind=True, context=outside.context)
    hello = outside.get(outside.backend, lambda each: isinstance(each, GeneratorHello))
    assert isinstance(hello, GeneratorHello) and hello.requests == [1]
    while (again := grown())[0]:
        pass  # it was told before the generator noticed
    assert again[1][: len(before)] == before


def test_what_an_update_may_discard_is_not_read_along(start: Callable[..., Outside]) -> None:
    outside = start("generator.on_update=abort")
    outside.load(0)
    outside.generate(1, gate=0, stream=True)
    assert isinstance(outside.get(outside.backend, lambda each: isinstance(each, Generated | Grown)), Generated)


def test_a_request_of_a_past_timeline_is_refused(start: Callable[..., Outside]) -> None:
    outside = start()
    outside.load(0)
    outside.generate(1, gate=7, timeline=-1)
    answer = outside.answer()
    assert (answer.finish_reason, answer.error) == ("error", "timeline -1 is over; this is 0")


def test_only_the_newest_notice_is_loaded_and_a_load_is_no_hang(start: Callable[..., Outside]) -> None:
    outside = start("generator.options.load_s=3")
    checksums = [outside.publish(n) for n in range(3)]
    for n in range(3):
        send(outside.notices, WeightNotice(Version(0, n), []))
    beats = [outside.heartbeat(lambda beat: beat.busy) for _ in range(3)]
    assert beats[0].progress < beats[-1].progress
    status = outside.get(outside.status, lambda each: isinstance(each, WeightStatus) and each.version.n >= 0)
    assert isinstance(status, WeightStatus) and (status.version.n, status.checksum) == (2, checksums[2])
    assert outside.heartbeat(lambda beat: not beat.busy).stats["loads"] == 1


def test_a_load_that_advances_is_not_ended_by_the_clock(start: Callable[..., Outside]) -> None:
    outside = start("generator.options.load_s=5", "weights.deadline_s=1.5")
    outside.load(0)


def test_weights_that_do_not_arrive_end_the_process(start: Callable[..., Outside]) -> None:
    outside = start("weights.deadline_s=0.5")
    send(outside.notices, WeightNotice(Version(0, 5), []))
    status = outside.get(outside.status, lambda each: isinstance(each, WeightStatus) and each.error != "")
    assert isinstance(status, WeightStatus) and "weights of version 5" in status.error
    fatal = outside.get(outside.control, lambda each: isinstance(each, Fatal))
    assert isinstance(fatal, Fatal) and "weights of version 5" in fatal.message
    assert outside.process.wait(timeout=60) == 1
