"""The shared-memory file: space, stale files, and its torch side."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl.config.schema import ConfigError
from rl.weights.channel import Entry, Piece, Placement, WeightsError
from rl.weights.host import ends as copying
from rl.weights.host import shm_file
from rl.weights.host.ends import tensors
from rl.weights.host.ends import write as write_pieces
from rl.weights.host.layout import Manifest, Segment, digest
from rl.weights.host.shm import ShmReceiver, ShmSender
from rl.weights.host.shm_file import check_space, remove_slots, slots_path, sweep_stale
from rl.weights.host.slots import draft_of
from rl.wire.messages import Version
from rl.wire.process import WaitExpired
from rl.wire.run import RunFile
from tests.conftest import MakeRun

SPAWN = multiprocessing.get_context("spawn")
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


@contextmanager
def hung_owner(target: Callable[..., None], run: RunFile, folder: Path) -> Iterator[None]:
    """A process that made the run's slots and hangs; killed in the end."""
    made = SPAWN.Event()
    owner = SPAWN.Process(target=target, args=(str(run.folder), str(folder), made))
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
    begun = tmp_path / "fresco-00000000-weights"  # its owner has not written its name yet
    with hung_owner(make_and_hang, dead_run, tmp_path):
        live = ShmSender(live_run, 0, ENTRIES)
        live.open()
        begun.touch()
        (tmp_path / "something-else").touch()
        assert sweep_stale() == []

    assert sweep_stale() == [slots_path(dead_run.run_id)]
    os.utime(begun, (time.time() - 600,) * 2)
    assert sweep_stale() == [begun]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"fresco-{live_run.run_id}-weights", "something-else"]
    remove_slots(live_run.run_id)
    remove_slots(live_run.run_id)
    live.close()


def test_slots_of_a_learner_that_comes_back_are_not_swept_but_adopted(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its supervisor, here this process, lives; another run's start sweeps meanwhile."""
    monkeypatch.setattr(shm_file, "FOLDER", tmp_path)
    monkeypatch.setenv("FRESCO_PARENT_PID", str(os.getpid()))
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


def test_much_is_hashed_in_a_second_thread_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(spec.name, torch.randn(spec.shape), Placement(spec.shape)) for spec in MANIFEST.tensors]
    hashed_by: list[str] = []

    def hashing(data: Any) -> int:
        hashed_by.append(threading.current_thread().name)
        return digest(data)

    def written() -> tuple[list[Segment], bytes]:
        view = memoryview(bytearray(MANIFEST.total_bytes))
        return write_pieces(view, MANIFEST, rows), bytes(view)

    little = written()
    monkeypatch.setattr(copying, "digest", hashing)
    monkeypatch.setattr(copying, "_THREAD_BYTES", MANIFEST.total_bytes)
    assert written() == little
    assert len(hashed_by) == len(rows) and threading.current_thread().name not in hashed_by


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
