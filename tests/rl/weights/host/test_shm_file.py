"""The shared-memory file: space, stale files, and its torch side."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl.config.schema import ConfigError
from rl.weights.channel import Entry, Piece, Placement, WeightsError
from rl.weights.host import ends, layout, shm_file
from rl.weights.host.ends import tensors
from rl.weights.host.ends import write as write_pieces
from rl.weights.host.layout import Manifest, combined_checksum, digest
from rl.weights.host.shm import ShmReceiver, ShmSender
from rl.weights.host.shm_file import SlotsFile, check_space, remove_slots, slots_path, sweep_stale
from rl.weights.host.slots import draft_of
from rl.wire.messages import Version
from rl.wire.process import WaitExpired
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.copies import COPIES

ROOT = Path(__file__).parents[4]
ENTRIES: list[Entry] = [("a", (300, 77), "bfloat16"), ("b", (5,), "float32"), ("c", (40, 3, 2), "bfloat16")]
MANIFEST = Manifest.layout(ENTRIES)


def test_a_small_shared_memory_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=16384, f_frsize=4096))  # Docker's 64 MB
    check_space(16 << 20, 3)
    with pytest.raises(ConfigError) as error:
        check_space(1 << 30, 3)
    text = str(error.value)
    assert "0.07 GB free" in text and "3 weight slots need 3.22 GB" in text and "\n" not in text
    assert "weights.transport=zmq" in text and "--shm-size=3380m" in text


def test_no_space_at_start_leaves_no_file(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    run = make_run()
    with pytest.raises(ConfigError, match="enlarge it"):
        ShmSender(run, 0, ENTRIES).open()
    assert not slots_path(run.run_id).exists()


@pytest.mark.parametrize("writable", [False, True])
def test_all_pages_are_mapped_at_once(make_run: MakeRun, writable: bool) -> None:
    """Who met a fresh one in an update would take ten times as long."""
    run = make_run()
    made = SlotsFile.create(run, Manifest.layout([("a", (1 << 20,), "float32")]))
    attached = SlotsFile.attach(run, writable=writable)

    maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
    resident = [int(each.split("Rss:")[1].split()[0]) << 10 for each in maps if str(slots_path(run.run_id)) in each]
    assert max(resident) >= run.config.weights.slots * (1 << 22)
    remove_slots(run.run_id)
    del made, attached


@contextmanager
def hung_owner(target: Callable[..., None], run: RunFile, folder: Path) -> Iterator[None]:
    """A process that made the run's slots and hangs; killed in the end."""
    made = COPIES.Event()
    owner = COPIES.Process(target=target, args=(str(run.folder), str(folder), made))
    owner.start()
    try:
        assert made.wait(120)
        yield
    finally:
        owner.kill()
        owner.join(60)


def make_and_hang(folder: str, shm: str, made: object) -> None:
    shm_file.FOLDER = Path(shm)
    ShmSender(RunFile.load(folder), 0, ENTRIES).open()
    made.set()  # type: ignore[attr-defined]
    time.sleep(600)


def test_sweep_removes_files_of_dead_runs_only(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shm_file, "FOLDER", tmp_path)
    dead_run = make_run()
    live_run = make_run()
    foreign = tmp_path / "fresco-00000000-weights"  # no living process has it open
    with hung_owner(make_and_hang, dead_run, tmp_path):
        live = ShmSender(live_run, 0, ENTRIES)
        live.open()
        (tmp_path / "something-else").touch()
        assert sweep_stale() == []

    foreign.write_bytes(b"of an earlier version")
    assert sorted(sweep_stale()) == sorted([slots_path(dead_run.run_id), foreign])
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"fresco-{live_run.run_id}-weights", "something-else"]
    remove_slots(live_run.run_id)
    remove_slots(live_run.run_id)
    live.close()


def test_a_file_has_no_name_before_it_is_whole(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever looks while it is made sees nothing to sweep or to read, and a maker that is killed leaves nothing."""
    monkeypatch.setattr(shm_file, "FOLDER", tmp_path)
    run = make_run()
    seen = []
    allocate = os.posix_fallocate

    def look(descriptor: int, offset: int, size: int) -> None:
        seen.append((list(tmp_path.iterdir()), sweep_stale(), SlotsFile.attach(run, writable=False)))
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", look)
    sender = ShmSender(run, 0, ENTRIES)
    sender.open()
    assert seen == [([], [], None)] and slots_path(run.run_id).exists()
    sender.close()


ELSEWHERE = """
import os
import sys
from pathlib import Path

from rl.weights.host import shm_file
from rl.weights.host.shm import ShmReceiver
from rl.wire.messages import Version
from rl.wire.run import RunFile

shm_file.FOLDER = Path(sys.argv[2])
print("swept", [path.name for path in shm_file.sweep_stale()])
if sys.argv[1]:
    reader = ShmReceiver(RunFile.load(sys.argv[1]), "generator-1-0", 0)
    reader.open(5)
    print("read", bytes(reader.lease(Version(0, 1), 5)[1][:1]), flush=True)
    sys.stdin.read()
    os._exit(0)
"""


def elsewhere(folder: str, shm: Path) -> subprocess.Popen[str]:
    """A process that numbers processes in its own way, as one in another container does: it sweeps, then reads."""
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*alone, sys.executable, "-c", ELSEWHERE, folder, str(shm)]
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, text=True, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe)


def told(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="a PID namespace needs root")
def test_the_living_are_known_in_another_container(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Containers that share memory and not the numbers of processes: neither side sweeps or frees what is held."""
    monkeypatch.setattr(shm_file, "FOLDER", tmp_path)
    run = make_run()
    writer = ShmSender(run, 0, ENTRIES)
    writer.open()
    write(writer, Version(0, 1), 1)

    with elsewhere(str(run.folder), tmp_path) as reader:
        assert told(reader) == "swept []" and told(reader) == "read b'\\x01'"
        assert writer._slots is not None
        for n in (2, 3, 4):  # the other slots, again and again: its lease is that of a living process
            write(writer, Version(0, n), n)
            with writer._slots.lock() as table:
                assert table.end_dead(writer._slots._lives) == [] and len(table.leased()) == 1
        reader.communicate()  # it ends, and gives nothing back
        with writer._slots.lock() as table:
            assert table.end_dead(writer._slots._lives) == ["generator-1-0"]

    dead = make_run()
    with hung_owner(make_and_hang, dead, tmp_path):
        pass
    with elsewhere("", tmp_path) as sweeper:
        assert told(sweeper) == f"swept ['{slots_path(dead.run_id).name}']"
    writer.close()


@pytest.mark.parametrize("how", ["the next version", "a generator's death"])
def test_a_file_that_was_removed_is_made_again(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    """With what was published, for who comes anew; who had it open goes over to it."""
    monkeypatch.setattr(shm_file, "FOLDER", tmp_path)
    run = make_run("learner.ranks=2", "generator.count=2")
    writers = [ShmSender(run, rank, ENTRIES) for rank in range(2)]
    for writer in writers:
        writer.open()
    reader = ShmReceiver(run, "generator-0-0", 0)
    reader.open(5)
    publish_both(writers, 1)

    _, leased = reader.lease(Version(0, 1), 5)
    slots_path(run.run_id).unlink()
    with pytest.raises(WaitExpired):
        ShmReceiver(run, "generator-1-0", 0).open(0.01)
    if how == "the next version":
        publish_both(writers, 2)
    else:
        writers[0].receiver_died("generator-1", 0)

    newest = 2 if how == "the next version" else 1
    late = ShmReceiver(run, "generator-1-0", 1)
    late.open(5)
    version, found = late.lease(Version(0, 1), 5)
    assert version == Version(0, newest) and values(found) == {newest}
    assert values(leased) == {1} and reader.release(), "who reads on from the old one reads what it leased"
    assert late.release()
    publish_both(writers, 3)
    version, found = reader.lease(Version(0, 3), 5)
    assert values(found) == {3} and reader.receipt() == writers[0].checksum(version, 5)

    del leased, found
    reader.close()
    late.close()
    for writer in writers:
        writer.close()
    assert not list(tmp_path.iterdir())


def test_who_reads_a_removed_file_goes_on_while_another_is_made(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That may take minutes."""
    monkeypatch.setattr(shm_file, "FOLDER", tmp_path)
    monkeypatch.setattr(shm_file, "_LOCK_DEADLINE_S", 0.5)
    run = make_run()
    writer = ShmSender(run, 0, ENTRIES)
    writer.open()
    write(writer, Version(0, 1), 1)
    reader = ShmReceiver(run, "generator-0-0", 0)
    reader.open(5)
    reader.lease(Version(0, 1), 5)
    slots_path(run.run_id).unlink()

    map_pages = shm_file._map_pages
    released: list[bool] = []

    def mapping(data: np.ndarray) -> None:
        if not released:
            released.append(reader.release())
        map_pages(data)

    monkeypatch.setattr(shm_file, "_map_pages", mapping)
    writer.receiver_died("generator-1", 0)
    assert released == [True] and slots_path(run.run_id).exists()
    reader.close()
    writer.close()


def test_slots_of_a_learner_that_comes_back_are_not_swept_but_adopted(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A reader has them open; another run's start sweeps meanwhile."""
    monkeypatch.setattr(shm_file, "FOLDER", tmp_path)
    run = make_run()
    reader = ShmReceiver(run, "generator-0-0", 0)
    with hung_owner(publish_and_hang, run, tmp_path):
        reader.open(60)

    assert sweep_stale() == []
    version, before = reader.lease(Version(0, 1), 5)
    assert version == Version(0, 1)

    writer = ShmSender(run, 0, ENTRIES)
    writer.open()
    assert reader.release()
    write(writer, draft_of(2), 3)
    writer.announce(Version(0, 2))
    version, after = reader.lease(Version(0, 2), 5)
    assert version == Version(0, 2) and bytes(after[:4]) == bytes([3] * 4) != bytes(before[:4])
    assert reader.receipt() == writer.checksum(Version(0, 2), 5)

    del before, after
    reader.release()
    reader.close()
    writer.close()


def write(writer: ShmSender, version: Version, value: int) -> None:
    view = writer.begin(version, 5)
    view[:] = bytes([value]) * len(view)
    writer.commit([(at.offset, at.nbytes, digest(view[at.offset :][: at.nbytes])) for at in MANIFEST.tensors])


def values(view: memoryview) -> set[int]:
    """Of all bytes of all tensors."""
    return {byte for at in MANIFEST.tensors for byte in view[at.offset : at.offset + at.nbytes]}


def publish_both(writers: list[ShmSender], n: int) -> None:
    """Each of two ranks writes half of the bytes of a version."""
    for rank, writer in enumerate(writers):
        view = writer.begin(Version(0, n), 5)
        for spec in MANIFEST.tensors:
            view[spec.offset : spec.offset + spec.nbytes] = bytes([n]) * spec.nbytes
        half = [MANIFEST.tensors[:1], MANIFEST.tensors[1:]][rank]
        writer.commit([(at.offset, at.nbytes, digest(view[at.offset :][: at.nbytes])) for at in half])


def publish_and_hang(folder: str, shm: str, made: object) -> None:
    """Dies with a version that is published and a draft that is not."""
    shm_file.FOLDER = Path(shm)
    writer = ShmSender(RunFile.load(folder), 0, ENTRIES)
    writer.open()
    write(writer, Version(0, 1), 1)
    write(writer, draft_of(2), 2)
    made.set()  # type: ignore[attr-defined]
    time.sleep(600)


def test_a_reader_does_not_attach_to_what_a_dead_owner_left(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shm_file, "FOLDER", tmp_path)
    run = make_run()
    with hung_owner(make_and_hang, run, tmp_path):
        reader = ShmReceiver(run, "generator-0-0", 0)
        reader.open(60)
        reader.close()

    with pytest.raises(WaitExpired):
        ShmReceiver(run, "generator-0-0", 1).open(0.2)


def test_ranks_with_different_tensors_are_refused(make_run: MakeRun) -> None:
    run = make_run("learner.ranks=2")
    first = ShmSender(run, 0, ENTRIES)
    first.open()
    with pytest.raises(WeightsError, match="another layout"):
        ShmSender(run, 1, [("a", (1,), "float32")]).open()
    first.close()


def test_the_lock_of_a_stopped_process_is_named(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_file, "_LOCK_DEADLINE_S", 0.2)
    run = make_run()
    writer = ShmSender(run, 0, ENTRIES)
    reader = ShmReceiver(run, "generator-0-0", 0)
    writer.open()
    reader.open(60)
    assert writer._slots is not None

    with (
        writer._slots.lock(),
        pytest.raises(WaitExpired, match=f"held by stopped process {os.getpid()}"),
    ):
        reader.lease(Version(0, 0), 1)
    reader.close()
    writer.close()


@pytest.mark.parametrize("ranks", [1, 3])
def test_tensors_arrive_cast_and_whole(make_run: MakeRun, ranks: int) -> None:
    run = make_run(f"learner.ranks={ranks}")
    writers = [ShmSender(run, rank, ENTRIES) for rank in range(ranks)]
    for writer in writers:
        writer.open()
    reader = ShmReceiver(run, "generator-0-0", 0)
    reader.open(60)
    masters = {spec.name: torch.randn(spec.shape) for spec in MANIFEST.tensors}

    for rank, writer in enumerate(writers):
        view = writer.begin(Version(0, 0), 5)
        shards: list[Piece] = []
        for name, master in masters.items():
            size = -(-len(master) // ranks)  # as Shard(0) splits: even, the last ones shorter or empty
            place = Placement(tuple(master.shape), min(rank * size, len(master)))
            shards.append((name, master[rank * size : (rank + 1) * size], place))
        writer.commit(write_pieces(view, MANIFEST, shards))

    _, view = reader.lease(Version(0, 0), 5)
    checksum = reader.receipt()
    assert checksum == writers[0].checksum(Version(0, 0), 1)
    arrived = dict(tensors(MANIFEST, view))
    assert list(arrived) == ["a", "b", "c"]
    for spec in MANIFEST.tensors:
        assert arrived[spec.name].dtype == (torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32)
        assert torch.equal(arrived[spec.name], masters[spec.name].to(arrived[spec.name].dtype))

    del arrived, view
    assert reader.release()
    reader.close()
    for writer in writers:
        writer.close()


def test_much_is_hashed_by_several_threads_part_by_part(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides the first hash ends when a second one has begun, which one thread alone would never see."""
    rows = [(spec.name, torch.randn(spec.shape), Placement(spec.shape)) for spec in MANIFEST.tensors]
    little = memoryview(bytearray(MANIFEST.total_bytes))
    write_pieces(little, MANIFEST, rows)

    run = make_run()
    writer, reader = ShmSender(run, 0, ENTRIES), ShmReceiver(run, "generator-0-0", 0)
    writer.open()
    together = threading.Barrier(2)
    due: list[threading.Barrier] = []

    def hashing(data: Any) -> int:
        if due:
            due.pop().wait(60)
        return digest(data)

    monkeypatch.setattr(layout, "digest", hashing)
    monkeypatch.setattr(layout, "_THREAD_BYTES", MANIFEST.total_bytes)
    monkeypatch.setattr(layout, "_THREADS", 2)
    monkeypatch.setattr(ends, "PART_BYTES", 20_000)

    due += [together, together]
    view = writer.begin(Version(0, 0), 5)
    segments = write_pieces(view, MANIFEST, rows)
    assert bytes(view) == bytes(little) and not due
    assert [length for _, length, _ in segments] == [20_000, 20_000, 6_200, 20, 480]
    writer.commit(segments)

    due += [together, together]
    reader.take(Version(0, 0), 5)
    assert reader.receipt() == combined_checksum(np.array(segments, np.uint64)) and not due
    assert reader.release()
    del view
    reader.close()
    writer.close()


def test_pieces_that_do_not_fit_are_named() -> None:
    place = Placement(())
    view = memoryview(bytearray(MANIFEST.total_bytes))
    with pytest.raises(WeightsError, match="'d' is not in the manifest"):
        write_pieces(view, MANIFEST, [("d", torch.zeros(1), place)])
    with pytest.raises(WeightsError, match=r"'b'.*rows from 3 on of shape \(3,\) do not fit"):
        write_pieces(view, MANIFEST, [("b", torch.zeros(3), place._replace(row=3))])
    with pytest.raises(WeightsError, match="'a'"):
        write_pieces(view, MANIFEST, [("a", torch.zeros(2, 76), place)])
    assert write_pieces(view, MANIFEST, [("a", torch.zeros(0, 77), place._replace(row=300))]) == []
