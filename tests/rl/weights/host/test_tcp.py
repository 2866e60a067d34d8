"""Channel `tcp`, with addresses of this machine as machines: whatever is lost, damaged or killed, weights are right."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq

from rl.weights import make_receiver, make_sender
from rl.weights.channel import Receiver, Sender, WeightsCorrupt
from rl.weights.host import bulk, frames, patches, tcp
from rl.weights.host.bulk import BulkReader, BulkServer, Parcel, chunks
from rl.weights.host.shm_file import remove_slots
from rl.weights.host.tcp import TcpReceiver, TcpSender
from rl.wire.messages import Version
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.copies import COPIES
from tests.rl.weights.host.following import ENTRIES, content, follow, is_right, on_machine
from tests.rl.weights.offering import offer_rows


def offer(senders: list[Sender], n: int, tensors: dict[str, torch.Tensor] | None = None) -> None:
    assert offer_rows(senders, n, content(n) if tensors is None else tensors) is not None


def load(receiver: Receiver, at_least: int) -> int:
    """Loads as an engine does; returns the version, which is right."""
    version, tensors = receiver.take(Version(0, at_least), 20)
    assert receiver.receipt() is not None and is_right(tensors, version.n)
    assert receiver.release()
    return version.n


class Cluster:
    """The learner on machine 1, and receivers on others, all in this process."""

    def __init__(self, run: RunFile) -> None:
        self.run = run
        self.senders: list[Sender] = [make_sender(run, rank, ENTRIES) for rank in range(run.config.learner.ranks)]
        for sender in self.senders:
            sender.open()
        self.endpoints = run.addresses.questions()[0]
        self.receivers: list[Receiver] = []

    def receiver(self, index: int, machine: int) -> Receiver:
        run = on_machine(str(self.run.folder), machine, self.endpoints)
        self.receivers.append(make_receiver(run, f"generator-{index}-0", 0))
        return self.receivers[-1]

    def fetched(self) -> tuple[int, int]:
        """Parts of ranks that went sparse, and dense, so far."""
        stats = self.senders[0].stats()
        return int(stats.get("sparse", 0)), int(stats.get("dense", 0))

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        for sender in reversed(self.senders):
            sender.close()
        remove_slots(self.run.run_id)


Make = Callable[..., Cluster]


@pytest.fixture
def cluster(make_run: MakeRun) -> Iterator[Make]:
    made: list[Cluster] = []

    def make(*overrides: str, ranks: int = 2) -> Cluster:
        made.append(
            Cluster(make_run("network.transport=tcp", f"learner.ranks={ranks}", "generator.count=4", *overrides))
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_it_is_what_tcp_means(make_run: MakeRun) -> None:
    assert make_run("network.transport=tcp").config.channel == "tcp"
    assert make_run().config.channel == "shm"


def test_a_version_crosses_once_for_all_engines_of_a_machine(cluster: Make) -> None:
    found = cluster()
    readers = [found.receiver(index, 2) for index in range(3)]
    for n in range(3):
        offer(found.senders, n)
        threads = [threading.Thread(target=load, args=(reader, n)) for reader in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(found.fetched()) == 2 * (n + 1)  # a part of each rank
        assert [load(reader, n) for reader in readers] == [n] * 3


@pytest.mark.parametrize(
    ("delta", "machine", "sparse"), [("auto", 2, True), ("auto", 1, False), ("always", 1, True), ("off", 2, False)]
)
def test_who_gets_what(cluster: Make, delta: str, machine: int, sparse: bool) -> None:
    found = cluster(f"weights.delta={delta}")
    reader = found.receiver(0, machine)
    for n in range(3):
        offer(found.senders, n)
        assert load(reader, n) == n
    assert found.fetched() == ((4, 2) if sparse else (0, 6))


def test_who_skipped_some_gets_several_patches_and_who_skipped_many_gets_all(cluster: Make) -> None:
    found = cluster()
    reader = found.receiver(0, 2)
    seen = []
    for n in (*range(7), *range(14, 14 + patches.KEPT + 2)):
        offer(found.senders, n)
        if n in (0, 1, 6, 14, 15):
            load(reader, n)
            seen.append(found.fetched())
    load(reader, 0)
    seen.append(found.fetched())
    assert seen == [(0, 2), (2, 2), (4, 2), (4, 4), (6, 4), (6, 6)]  # five at once are sparse; half changed to the 14th


def test_always_means_also_where_much_changed(cluster: Make) -> None:
    found = cluster("weights.delta=always")
    reader = found.receiver(0, 2)
    for n in (6, 7, 11, 13):
        offer(found.senders, n)
        load(reader, n)
    assert found.fetched() == (6, 2)


def test_a_damaged_base_is_noticed_and_all_is_fetched(cluster: Make) -> None:
    found = cluster()
    reader, late = found.receiver(0, 2), found.receiver(1, 2)
    offer(found.senders, 0)
    load(reader, 0)

    assert isinstance(reader, TcpReceiver) and reader._slots is not None
    newest = reader._slots.table.newest()
    assert newest is not None
    reader._slots.view(newest)[500] ^= 1
    offer(found.senders, 1)
    assert load(reader, 1) == 1 and load(late, 1) == 1
    assert found.fetched() == (2, 3)  # one rank's part again


def test_what_is_damaged_at_the_learner_is_found_and_named(cluster: Make) -> None:
    found = cluster(ranks=1)
    reader = found.receiver(0, 2)
    offer(found.senders, 0)
    (sender,) = found.senders
    assert isinstance(sender, TcpSender) and sender._slots is not None
    place = next(spec.offset for spec in sender._manifest.tensors if spec.name == "layer.7")
    sender._slots.view(0)[place + 1234] ^= 1
    with pytest.raises(WeightsCorrupt, match=r"generator-0-0, version 0\.0: tensor 'layer\.7'"):
        load(reader, 0)
    offer(found.senders, 1)
    assert load(reader, 1) == 1


def test_a_timeline_begins_whole_and_goes_on_sparse(cluster: Make) -> None:
    found = cluster()
    reader = found.receiver(0, 2)
    offer(found.senders, 0)
    load(reader, 0)
    for sender in reversed(found.senders):
        sender.close()

    again = Cluster(found.run)
    assert isinstance(reader, TcpReceiver)
    reader.run.addresses.give(again.endpoints)
    found.senders = again.senders
    for n in (2, 3):
        offer_rows(again.senders, n, content(n), timeline=1)
        version, tensors = reader.take(Version(1, n), 20)
        assert version == Version(1, n) and reader.receipt() is not None
        assert is_right(tensors, n) and reader.release()
    assert again.fetched() == (2, 2)


# ------------------------------------------------------------ a link that damages, loses and repeats


class Relay:
    """Between readers and a bulk server, real sockets on both sides. `spoil` makes of an answer those that arrive."""

    def __init__(self, endpoint: str, spoil: Callable[[list[bytes]], list[list[bytes]]]) -> None:
        self._context: zmq.SyncContext = zmq.Context.instance()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind("tcp://127.0.0.1:*")
        self.endpoint = self._front.get_string(zmq.LAST_ENDPOINT)
        self._server = endpoint
        self._spoil = spoil
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self.heard: list[list[bytes]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(10)

    def _serve(self) -> None:
        while not self._stopping:
            poller = zmq.Poller()
            for socket in (self._front, *self._backs.values()):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(20))
            if self._front in ready:
                peer, *asked = self._front.recv_multipart()
                self.heard.append([peer, *asked])
                if peer not in self._backs:
                    self._backs[peer] = self._context.socket(zmq.DEALER)
                    self._backs[peer].setsockopt(zmq.IDENTITY, peer)
                    self._backs[peer].connect(self._server)
                self._backs[peer].send_multipart(asked)
            for peer, socket in self._backs.items():
                if socket in ready:
                    for answer in self._spoil(socket.recv_multipart()):
                        self._front.send_multipart([peer, *answer])
        for socket in (self._front, *self._backs.values()):
            socket.close(linger=0)


class Spoiler:
    def __init__(self) -> None:
        self.random = random.Random(3)
        self.did: dict[str, int] = {}
        self.before: list[list[bytes]] = []

    def __call__(self, answer: list[bytes]) -> list[list[bytes]]:
        self.before.append(answer)
        what = self.random.choice(["nothing", "flip", "lose", "repeat", "old", "cut", "renumber", "extra"])
        self.did[what] = self.did.get(what, 0) + 1
        number, data, tag = answer
        flipped = bytearray(data)
        if flipped:
            flipped[self.random.randrange(len(flipped))] ^= 1 << self.random.randrange(8)
        return {
            "nothing": [answer],
            "flip": [[number, bytes(flipped), tag]],
            "lose": [],
            "repeat": [answer, answer, answer],
            "old": [self.random.choice(self.before), answer],
            "cut": [[number, data[:-1], tag], answer],
            "renumber": [[(int.from_bytes(number, "little") + 1).to_bytes(8, "little"), data, tag], answer],
            "extra": [[number, data, tag, b""], [number], [b"", b"", b""], answer],
        }[what]


def test_a_link_that_damages_loses_and_repeats_costs_time_and_never_weights(
    cluster: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (frames, tcp):
        monkeypatch.setattr(module, "SILENCE_S", 0.2)
    monkeypatch.setattr(bulk, "CHUNK_BYTES", 20_000)  # many messages
    monkeypatch.setattr(frames, "CHUNK_BYTES", 20_000)
    spoiler = Spoiler()
    relays: dict[int, Relay] = {}
    grant = BulkServer.grant

    def through_a_relay(self: BulkServer, *arguments: Any) -> Parcel:
        parcel = grant(self, *arguments)
        if id(self) not in relays:
            relays[id(self)] = Relay(parcel.endpoint, spoiler)
        return Parcel(relays[id(self)].endpoint, parcel.identity, parcel.key)

    found = cluster()
    reader = found.receiver(0, 2)
    try:
        for n in range(8):
            spoiler.random.seed(n)
            if n:
                monkeypatch.setattr(BulkServer, "grant", through_a_relay)
            offer(found.senders, n)
            assert load(reader, n) == n
        assert len(spoiler.did) == 8, spoiler.did
    finally:
        for relay in relays.values():
            relay.stop()


def test_who_has_no_key_gets_nothing(cluster: Make) -> None:
    found = cluster(ranks=1)
    (sender,) = found.senders
    offer(found.senders, 0)
    assert isinstance(sender, TcpSender) and sender._bulk is not None
    server = sender._bulk
    parcel = server.grant("generator-0-0.3", [b"secret" * 100])

    def asks(parcel: Parcel, seconds: float = 0.3) -> bool:
        """Whether anything comes."""
        into = bytearray(600)
        reader = BulkReader(parcel, chunks(0, 600), [memoryview(into)])
        try:
            while reader.socket.poll(int(1000 * seconds)):
                if reader.receive():
                    return bytes(into) == b"secret" * 100
            return False
        finally:
            reader.close()

    other = bytes(16)
    assert not asks(Parcel(parcel.endpoint, b"\1" + other, parcel.key))  # the key, but another name
    assert not asks(Parcel(parcel.endpoint, parcel.identity, other))  # the name, but another run's key
    assert server.refused == 2
    assert asks(parcel)
    assert not asks(parcel)  # the same frames once more
    server.revoke("generator-0", 2)
    server.revoke("generator-00", 3)
    assert server._grants
    server.revoke("generator-0", 3)
    assert not server._grants
    assert not asks(parcel)
    assert server.refused == 4


# ------------------------------------------------------------ processes that die


class Follower:
    def __init__(self, found: Cluster, index: int, incarnation: int, dies: int = 0) -> None:
        self.index = index
        self.incarnation = incarnation
        self.asked: int | None = None
        self.ask, theirs = COPIES.Pipe()
        machine = 2 + index // 2
        arguments = str(found.run.folder), machine, f"generator-{index}-0", incarnation, found.endpoints, dies, theirs
        self.process = COPIES.Process(target=follow, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def told(self) -> tuple[int, int, bool] | None:
        """What it loaded; None if it was killed."""
        try:
            assert self.ask.poll(60)
            found: tuple[int, int, bool] = self.ask.recv()
            return found
        except (EOFError, ConnectionResetError):
            self.process.join(10)
            assert self.process.exitcode == -signal.SIGKILL
            return None


@pytest.mark.parametrize("delta", ["auto", "always"])
def test_bits_are_equal_at_every_version_that_anybody_loads_while_some_die(cluster: Make, delta: str) -> None:
    """100 versions, two machines with two engines each, that skip what they like and are killed in fetches and between.

    `pytest -s` prints what was sent as what.
    """
    chance = random.Random(1)
    found = cluster(f"weights.delta={delta}")
    followers = [Follower(found, index, 0) for index in range(4)]
    receipts = {}
    loads = deaths = 0
    for n in range(100):
        receipts[n] = offer_rows(found.senders, n, content(n))
        asked = [each for each in followers if n == 99 or chance.random() < 0.4]
        killed = []
        for each in asked:
            each.ask.send(n)
            if chance.random() < 0.06 and n < 99:
                os.kill(each.process.pid or 0, signal.SIGKILL)
                killed.append(each)
        for each in asked:
            told = each.told()
            if told is not None:
                loads += 1
                assert told == (n, receipts[n], True)
            if told is None or each in killed:  # which may have answered before
                deaths += 1
                each.process.join(10)
                found.senders[0].receiver_died(f"generator-{each.index}", each.incarnation)
                dies = chance.choice([0, 1, 3000]) if n < 90 else 0
                followers[each.index] = Follower(found, each.index, each.incarnation + 1, dies)

    for each in followers:
        if n == 99 and each.process.is_alive():
            each.ask.send(None)
    sparse, dense = found.fetched()
    print(f"{delta}: {loads} loads, {deaths} deaths, {sparse} parts sparse, {dense} dense")
    assert loads > 100 and deaths > 10 and sparse > 100 and (dense > 40) == (delta == "auto")
