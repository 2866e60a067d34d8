"""All channels through hosts, end to end: the same guarantees through one interface, over processes and threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rl.weights import make_receiver, make_sender
from rl.weights.channel import Entry, WeightsCorrupt, WeightsError
from rl.weights.host import wire
from rl.weights.host.ends import HostReceiver, HostSender
from rl.weights.host.frames import FramesReceiver, pieces
from rl.weights.host.layout import Manifest, Segment, digest
from rl.weights.host.shm_file import remove_slots, slots_path
from rl.weights.host.tcp import TcpReceiver
from rl.wire.messages import Version
from rl.wire.process import WaitExpired
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.copies import COPIES

ENTRIES: list[Entry] = [
    ("embed", (1000, 100), "bfloat16"),
    ("norm", (7,), "float32"),
    ("none", (0, 3), "float32"),
    ("scalar", (), "float32"),
    *((f"layer.{i}", (33, 65), "bfloat16") for i in range(20)),
]
MANIFEST = Manifest.layout(ENTRIES)
Open = Callable[..., tuple[RunFile, HostSender, HostReceiver]]
TRANSPORTS = ["shm", "zmq", "zmq over tcp", "tcp"]


def run_for(make_run: MakeRun, transport: str, *overrides: str, ranks: int = 1) -> RunFile:
    tcp = ["network.transport=tcp"] if transport.endswith("tcp") else []
    planned = [f"learner.ranks={ranks}", "generator.count=2"]
    return make_run(f"weights.transport={transport.split()[0]}", *planned, *tcp, *overrides)


@pytest.fixture
def opened(make_run: MakeRun) -> Iterator[Open]:
    """A run with one rank and one reader, both open, closed after the test."""
    ends: list[HostSender | HostReceiver] = []

    def make(transport: str, *overrides: str) -> tuple[RunFile, HostSender, HostReceiver]:
        run = run_for(make_run, transport, *overrides)
        writer = sender_of(run)
        reader = receiver_of(run)
        ends.extend([reader, writer])
        writer.open()
        reader.open(10)
        return run, writer, reader

    yield make
    for end in ends:
        end.close()
        remove_slots(end.run.run_id)


def sender_of(run: RunFile, rank: int = 0) -> HostSender:
    sender = make_sender(run, rank, ENTRIES)
    assert isinstance(sender, HostSender)
    return sender


def receiver_of(run: RunFile, name: str = "generator-0-0", incarnation: int = 0) -> HostReceiver:
    receiver = make_receiver(run, name, incarnation)
    assert isinstance(receiver, HostReceiver)
    return receiver


def content(n: int, manifest: Manifest = MANIFEST) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, manifest.total_bytes, np.uint8)


def rows_of(rank: int, ranks: int) -> list[tuple[int, int]]:
    """Byte ranges of a rank's rows, as FSDP shards the first axis."""
    found = []
    for spec in MANIFEST.tensors:
        rows = spec.shape[0] if spec.shape else int(rank == 0)
        first, end = (rows * rank // ranks, rows * (rank + 1) // ranks) if spec.shape else (0, rows)
        if end > first:
            found.append((spec.offset + first * spec.row_bytes, (end - first) * spec.row_bytes))
    return found


def publish(writer: HostSender, n: int, rank: int = 0, ranks: int = 1) -> None:
    view = np.frombuffer(writer.begin(Version(0, n), 60), np.uint8)
    segments: list[Segment] = []
    for offset, length in rows_of(rank, ranks):
        view[offset : offset + length] = content(n)[offset : offset + length]
        segments.append((offset, length, digest(view[offset : offset + length].data)))
    writer.commit(segments)


def holds(view: memoryview, n: int) -> bool:
    data = np.frombuffer(view, np.uint8)
    return all(
        np.array_equal(data[s.offset : s.offset + s.nbytes], content(n)[s.offset : s.offset + s.nbytes])
        for s in MANIFEST.tensors
    )


def read(reader: HostReceiver, at_least: int) -> tuple[int, int]:
    """(version, checksum) of what a whole lease gave."""
    version, view = reader.lease(Version(0, at_least), 10)
    checksum = reader.receipt()
    assert holds(view, version.n)
    del view
    assert reader.release()
    return version.n, checksum


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_newest_version_arrives_with_the_writers_checksum(opened: Open, transport: str) -> None:
    _, writer, reader = opened(transport)
    assert reader.manifest == MANIFEST
    seen = set()
    for n in range(7):
        publish(writer, n)
        if n % 2 == 0:
            assert read(reader, n) == (n, writer.checksum(Version(0, n), 1))
            seen.add(writer.checksum(Version(0, n), 1))
    assert len(seen) == 4
    publish(writer, 8)
    publish(writer, 9)
    assert read(reader, 7)[0] == 9


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_view_is_read_only(opened: Open, transport: str) -> None:
    _, writer, reader = opened(transport)
    publish(writer, 0)
    _, view = reader.lease(Version(0, 0), 10)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1


@pytest.mark.parametrize("transport", ["shm", "zmq", "tcp"])
def test_the_writer_never_waits_for_a_reader_that_holds_a_lease(opened: Open, transport: str) -> None:
    _, writer, slow = opened(transport)
    publish(writer, 0)
    version, view = slow.lease(Version(0, 0), 10)
    for n in range(1, 8):
        publish(writer, n)  # WaitExpired where it waits
    assert version.n == 0 and holds(view, 0) and slow.receipt()
    del view
    assert slow.release()
    assert read(slow, 7)[0] == 7


@pytest.mark.parametrize("transport", ["shm", "zmq", "tcp"])
def test_waits_have_a_deadline_and_a_name(opened: Open, make_run: MakeRun, transport: str) -> None:
    _, writer, reader = opened(transport)
    publish(writer, 0)
    with pytest.raises(WaitExpired, match=r"generator-0-0 waits for .*0\.5 or newer"):
        reader.lease(Version(0, 5), 2)
    assert read(reader, 0)[0] == 0  # an expired wait leaves nothing behind
    lonely = receiver_of(run_for(make_run, transport), "generator-9-0")
    with pytest.raises(WaitExpired, match="generator-9-0 waits for learner rank 0"):
        lonely.open(0.2)


@pytest.mark.parametrize("transport", ["shm", "zmq", "tcp"])
def test_a_rank_that_does_not_commit_is_named(make_run: MakeRun, transport: str) -> None:
    run = run_for(make_run, transport, ranks=2)
    writers = [sender_of(run, rank) for rank in range(2)]
    for writer in writers:
        writer.open()
    publish(writers[0], 0, 0, 2)
    with pytest.raises(WaitExpired, match=r"learner rank 0 waits for rank 1 to commit version 0\.0"):
        writers[0].checksum(Version(0, 0), 0.2)
    publish(writers[1], 0, 1, 2)
    assert writers[0].checksum(Version(0, 0), 5)
    for writer in reversed(writers):
        writer.close()


def write_as_rank(folder: str, rank: int, ranks: int, versions: int, gate: object, done: object) -> None:
    run = RunFile.load(folder)
    writer = sender_of(run, rank)
    writer.open()
    for n in range(versions):
        time.sleep(0.003 * ((n + rank) % 3))  # ranks arrive at different moments
        publish(writer, n, rank, ranks)
        if rank == 0:
            assert writer.checksum(Version(0, n), 120)
        gate.wait(120)  # type: ignore[attr-defined]  # as the gradient reduction of the next step does
    assert done.wait(240)  # type: ignore[attr-defined]
    writer.close()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_two_rank_processes_make_consistent_versions(make_run: MakeRun, transport: str) -> None:
    run = run_for(make_run, transport, ranks=2)
    gate = COPIES.Barrier(2)
    done = COPIES.Event()
    ranks = [COPIES.Process(target=write_as_rank, args=(str(run.folder), r, 2, 40, gate, done)) for r in range(2)]
    for process in ranks:
        process.start()
    readers = [receiver_of(run, f"generator-{i}-0") for i in range(2)]
    try:
        seen: list[list[int]] = [[], []]

        def follow(index: int) -> None:
            readers[index].open(120)
            while not seen[index] or seen[index][-1] < 39:
                seen[index].append(read(readers[index], seen[index][-1] + 1 if seen[index] else 0)[0])

        threads = [threading.Thread(target=follow, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)

        for versions in seen:
            assert versions[-1] == 39 and versions == sorted(set(versions))
    finally:
        for reader in readers:
            reader.close()
        done.set()
        for process in ranks:
            process.join(120)
    assert [process.exitcode for process in ranks] == [0, 0]


def lease_and_hang(folder: str, leased: object) -> None:
    reader = receiver_of(RunFile.load(folder))
    reader.open(60)
    reader.lease(Version(0, 0), 60)
    leased.set()  # type: ignore[attr-defined]
    time.sleep(600)


def test_a_dying_reader_frees_its_lease_and_leaves_the_file(make_run: MakeRun) -> None:
    run = run_for(make_run, "shm", "weights.slots=2")
    writer = sender_of(run)
    writer.open()
    publish(writer, 0)
    leased = COPIES.Event()
    reader = COPIES.Process(target=lease_and_hang, args=(str(run.folder), leased))
    reader.start()
    assert leased.wait(120)
    publish(writer, 1)
    with pytest.raises(WaitExpired, match=r"the lease of generator-0-0 on version 0\.0"):
        writer.begin(Version(0, 2), 0.3)

    reader.kill()
    publish(writer, 2)  # while the killed reader is still a zombie
    reader.join(60)
    time.sleep(0.2)  # a resource tracker would unlink the file about now
    assert slots_path(run.run_id).exists()
    again = receiver_of(run, incarnation=1)
    again.open(60)
    assert read(again, 2)[0] == 2
    again.close()
    assert slots_path(run.run_id).exists()
    writer.close()
    assert not slots_path(run.run_id).exists()


def test_a_silent_reader_of_the_zmq_transport_loses_its_lease(make_run: MakeRun) -> None:
    run = run_for(make_run, "zmq", "weights.slots=2", "weights.deadline_s=1")
    writer = sender_of(run)
    writer.open()
    publish(writer, 0)
    reader = receiver_of(run)
    reader.open(60)
    (rank,) = reader._ranks  # type: ignore[attr-defined]

    begin = time.monotonic()
    assert rank.ask(wire.AskLease("generator-0-0", 0, Version(0, 0)), wire.Granted, 5)  # and then the reader hangs
    publish(writer, 1)
    publish(writer, 2)
    assert time.monotonic() - begin > 0.5
    assert read(reader, 2)[0] == 2  # it was only slow
    reader.close()
    writer.close()


def test_nobody_but_engines_takes_a_place_among_the_readers(make_run: MakeRun) -> None:
    """An environment server, say, which has the key of the run and a name of its own."""
    run = run_for(make_run, "zmq", "generator.count=1")
    writer = sender_of(run)
    writer.open()
    publish(writer, 0)

    stranger = wire.Connection(run, 0, "env_server.0")
    with pytest.raises(WeightsError, match=r"asks in the name of reader 'env_server\.0'"):
        stranger.ask(wire.AskLease("env_server.0", 0, Version(0, 0)), wire.Granted, 5)
    stranger.close()

    reader = receiver_of(run)
    reader.open(60)
    assert read(reader, 0)[0] == 0
    reader.close()
    writer.close()


@pytest.mark.parametrize("transport", ["shm", "zmq", "tcp"])
def test_torn_reads_are_noticed(opened: Open, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """The lease of a reader that reads on is ended for it, and its slot is overwritten."""
    _, writer, reader = opened(transport, "weights.slots=2")
    publish(writer, 0)
    if transport == "shm":
        _, view = reader.lease(Version(0, 0), 10)
        writer.receiver_died("generator-0", 0)
        publish(writer, 1)
        publish(writer, 2)

        assert not holds(view, 0)
        assert reader.receipt() == 0 and not reader.release()
        del view
    else:
        assert isinstance(reader, FramesReceiver | TcpReceiver)
        fetch: Any = reader._fetch
        granted: list[int] = []

        def fetch_late(*arguments: Any) -> Any:
            (grant,) = (each for each in arguments if isinstance(each, wire.Granted))
            granted.append(grant.version.n)
            if len(granted) == 1:
                writer.receiver_died("generator-0", 0)
                publish(writer, 1)
                publish(writer, 2)
            return fetch(*arguments)

        monkeypatch.setattr(reader, "_fetch", fetch_late)
        assert read(reader, 0)[0] == 2 and granted == [0, 2]
    assert read(reader, 2)[0] == 2


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_corrupted_byte_is_found_and_named(opened: Open, transport: str) -> None:
    _, writer, reader = opened(transport)
    publish(writer, 0)
    spec = next(spec for spec in MANIFEST.tensors if spec.name == "layer.7")
    slots = writer._slots
    assert slots is not None
    newest = slots.table.newest()

    assert newest is not None
    view = slots.view(newest)
    view[spec.offset + 1234] ^= 0x10
    reader.lease(Version(0, 0), 10)
    with pytest.raises(WeightsCorrupt, match=r"generator-0-0, version 0\.0: tensor 'layer\.7'"):
        reader.receipt()
    reader.release()
    publish(writer, 1)
    assert read(reader, 1)[0] == 1


def test_ranks_of_one_engine_share_the_work_of_a_proof(make_run: MakeRun) -> None:
    """They read the same memory: each hashes its part, and a damaged byte is found by exactly one of them."""
    run = make_run("weights.transport=shm", "generator.tensor_parallel=3")
    writer = sender_of(run)
    writer.open()
    readers = [receiver_of(run, f"generator-0-{rank}") for rank in range(3)]
    for n, damaged in enumerate([None, "embed", "norm", "layer.0", "layer.7", "layer.13", "layer.19"]):
        publish(writer, n)
        slots = writer._slots
        assert slots is not None
        slot = slots.table.newest()
        assert slot is not None
        for spec in MANIFEST.tensors:
            if spec.name == damaged:
                slots.view(slot)[spec.offset + 3] ^= 0x10

        hashed = 0
        answers: list[int | None] = []
        for reader in readers:
            reader.take(Version(0, n), 10)
            before = reader.progress
            try:
                answers.append(reader.receipt())
            except WeightsCorrupt as error:
                assert f"tensor '{damaged}'" in str(error)
                answers.append(None)
            hashed += reader.progress - before
            reader.release()
        assert hashed == sum(spec.nbytes for spec in MANIFEST.tensors)
        assert answers.count(None) == (damaged is not None)
        assert set(answers) - {None} == {writer.checksum(Version(0, n), 1)}
    for reader in readers:
        reader.close()
    writer.close()


@pytest.mark.parametrize("transport", ["shm", "zmq", "tcp"])
def test_unwritten_rows_are_an_error(opened: Open, transport: str) -> None:
    _, writer, _ = opened(transport)
    writer.begin(Version(0, 0), 1)
    rows = [(offset, length, 0) for offset, length in rows_of(0, 1)]
    with pytest.raises(WeightsError, match="not wholly written"):
        writer.commit(rows[:3] + rows[4:])
        writer.checksum(Version(0, 0), 1)


@pytest.mark.parametrize("transport", ["shm", "zmq", "tcp"])
def test_misuse_is_refused(opened: Open, transport: str) -> None:
    _, writer, reader = opened(transport)
    writer.begin(Version(0, 0), 1)
    with pytest.raises(WeightsError, match=r"begins 0\.1 before it committed 0\.0"):
        writer.begin(Version(0, 1), 1)
    with pytest.raises(WeightsError, match="no lease"):
        reader.release()
    with pytest.raises(WeightsError, match="not open"):
        sender_of(reader.run).begin(Version(0, 0), 1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_pieces_hold_every_row_of_a_rank_and_no_other(ranks: int) -> None:
    """A chunk may span padding, never bytes that another rank wrote."""
    total = 0
    for rank in range(ranks):
        own = np.zeros(MANIFEST.total_bytes, bool)
        for offset, length in rows_of(rank, ranks):
            own[offset : offset + length] = True
        foreign = np.zeros(MANIFEST.total_bytes, bool)
        for other in set(range(ranks)) - {rank}:
            for offset, length in rows_of(other, ranks):
                foreign[offset : offset + length] = True

        table = np.array([(offset, length, 0) for offset, length in rows_of(rank, ranks)], np.uint64)
        for offset, length in pieces(table, MANIFEST):
            assert not foreign[offset : offset + length].any()
            own[offset : offset + length] = False
            total += 1
        assert not own.any()
    if ranks == 1:
        assert total == 1  # tensors and their padding, in one run
