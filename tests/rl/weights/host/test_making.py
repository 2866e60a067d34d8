"""A large file of slots takes longer to make and to map than any deadline: who waits for it sees that it advances."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.config.schema import ConfigError
from rl.weights import make_receiver, make_sender
from rl.weights.channel import Receiver
from rl.weights.host import shm_file
from rl.weights.host.layout import Manifest
from rl.weights.host.shm import ShmReceiver, ShmSender
from rl.weights.host.shm_file import SlotsFile, made_bytes, remove_slots
from rl.wire.awake import Awake
from rl.wire.messages import Version
from rl.wire.process import WaitExpired
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.copies import COPIES
from tests.rl.weights.host.following import ENTRIES, content, is_right, on_machine
from tests.rl.weights.offering import offer_rows

MANIFEST = Manifest.layout(ENTRIES)
PIECE = 16 << 10
DEADLINE_S = 2.0
PASS_S = 2.5  # to allocate all of a file, and as long to map it
LOOK_S = 0.01


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shared memory of this test's own: whoever makes a file keeps others of the machine from it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(shm_file, "FOLDER", Path(folder))
        yield Path(folder)


def slow(folder: Path, pieces: float, said: Connection) -> None:
    """In this process each byte takes its time, as those of a large file do. It stands still after so many pieces."""
    shm_file.FOLDER = folder
    shm_file._PIECE = PIECE
    allocate = os.posix_fallocate
    map_pages = shm_file._map_pages
    begun = 0

    def wait_for(nbytes: int) -> None:
        nonlocal begun
        begun += 1
        if begun == 2:
            said.send("it is being made")
        if begun > pieces:
            said.send("it stands still")
            time.sleep(600)
        time.sleep(nbytes * PASS_S / (3 * MANIFEST.total_bytes))

    def allocating(descriptor: int, at: int, length: int) -> None:
        wait_for(length)
        allocate(descriptor, at, length)

    def mapping(data: Any) -> None:
        wait_for(len(data))
        map_pages(data)

    os.posix_fallocate = allocating
    shm_file._map_pages = mapping


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    ours, theirs = COPIES.Pipe()
    begun = COPIES.Process(target=target, args=(*arguments, theirs))
    begun.start()
    theirs.close()
    try:
        yield ours
    finally:
        begun.kill()
        begun.join(60)


def told(line: Connection) -> Any:
    assert line.poll(120)
    return line.recv()


def take_slowly(shared: Path, pieces: float, run: str, machine: int, name: str, endpoints: Any, said: Any) -> None:
    """As an engine does, whose generator looks at `progress`: what came, and how long it stood still at most."""
    slow(shared, pieces, said)
    receiver = make_receiver(on_machine(run, machine, endpoints), name, 0)
    found: list[Any] = []
    taking = threading.Thread(target=lambda: found.append(take(receiver)), daemon=True)
    taking.start()

    awake = Awake(time.monotonic(), LOOK_S)
    since = awake.read(time.monotonic())
    seen = longest = 0.0
    while taking.is_alive():
        taking.join(LOOK_S)
        now = awake.read(time.monotonic())
        if receiver.progress != seen:
            seen = receiver.progress
            since = now
        longest = max(longest, now - since)

    said.send((found[0], longest))
    receiver.close()


def take(receiver: Receiver) -> str:
    try:
        version, tensors = receiver.take(Version(0, 0), DEADLINE_S)
        right = is_right(tensors, version.n)
        return f"version {version.n}" if receiver.release() and right else "other bytes"
    except WaitExpired as error:
        return str(error)


@pytest.fixture
def machines(make_run: MakeRun, shared: Path) -> Iterator[tuple[RunFile, Any]]:
    """A run on several machines whose learner has published version 0, and where it listens."""
    run = make_run("network.transport=tcp", "generator.count=4")
    sender = make_sender(run, 0, ENTRIES)
    sender.open()
    offer_rows([sender], 0, content(0))
    yield run, run.addresses.questions()[0]
    sender.close()
    remove_slots(run.run_id)


@pytest.mark.parametrize("second", [2, 3])
def test_engines_of_a_machine_wait_for_a_file_that_takes_longer_than_the_deadline(
    shared: Path, machines: tuple[RunFile, Any], second: int
) -> None:
    """Or engines of two machines that are addresses of one box, which make theirs by turns."""
    run, endpoints = machines
    arguments = shared, 1e9, str(run.folder)
    with (
        process(take_slowly, *arguments, 2, "generator-0-0", endpoints) as one,
        process(take_slowly, *arguments, second, "generator-1-0", endpoints) as other,
    ):
        for line in (one, other):
            while isinstance(came := told(line), str):
                pass
            what, stood_still_s = came
            assert what == "version 0" and stood_still_s < DEADLINE_S


def test_a_maker_that_stands_still_is_found_and_one_that_dies_replaced(
    shared: Path, machines: tuple[RunFile, Any]
) -> None:
    run, endpoints = machines
    here = on_machine(str(run.folder), 2, endpoints)
    neighbour = make_receiver(here, "generator-1-0", 0)
    with process(take_slowly, shared, 9, str(run.folder), 2, "generator-0-0", endpoints) as maker:
        assert [told(maker), told(maker)] == ["it is being made", "it stands still"]
        assert made_bytes(here) == 9 * PIECE
        assert take(neighbour) == (
            "generator-1-0 waits for another process of 127.0.0.2 to make its weight slots (2 s)"
        )

    assert made_bytes(here) == 0 and not list(shared.iterdir())
    assert take(neighbour) == "version 0"
    neighbour.close()


def make_slowly(shared: Path, pieces: float, run: str, said: Any) -> None:
    slow(shared, pieces, said)
    ShmSender(RunFile.load(run), 0, ENTRIES).open()
    said.send("it is made")
    time.sleep(600)


def open_other(run: RunFile, kind: str) -> ShmSender | ShmReceiver:
    if kind == "rank 1":
        rank = ShmSender(run, 1, ENTRIES)
        rank.open()
        return rank
    engine = ShmReceiver(run, "generator-0-0", 0)
    engine.open(DEADLINE_S)
    return engine


@pytest.mark.parametrize("kind", ["rank 1", "an engine"])
def test_others_wait_for_rank_0_as_long_as_it_advances(make_run: MakeRun, shared: Path, kind: str) -> None:
    run = make_run("learner.ranks=2", f"timeouts.start_s={DEADLINE_S}")
    with process(make_slowly, shared, 1e9, str(run.folder)) as rank_0:
        assert told(rank_0) == "it is being made"
        other = open_other(run, kind)
        assert told(rank_0) == "it is made"
        other.close()


@pytest.mark.parametrize("kind", ["rank 1", "an engine"])
def test_others_wait_for_a_new_rank_0_that_maps_what_is_there(make_run: MakeRun, shared: Path, kind: str) -> None:
    """All ranks begin anew after a death, and engines may with them."""
    run = make_run("learner.ranks=2", f"timeouts.start_s={DEADLINE_S}")
    SlotsFile.create(run, MANIFEST).close()  # as its owner's death leaves it
    test_others_wait_for_rank_0_as_long_as_it_advances(lambda *_: run, shared, kind)


def test_a_file_of_another_layout_is_not_held(make_run: MakeRun, shared: Path) -> None:
    """Its memory would stay in use for the whole run."""
    run = make_run()
    SlotsFile.create(run, MANIFEST).close()
    assert SlotsFile.adopt(run, Manifest.layout(ENTRIES[:1])) is None
    assert not holds_one(shared)


@pytest.mark.parametrize("kind", ["rank 1", "an engine"])
def test_others_find_that_rank_0_stands_still(make_run: MakeRun, shared: Path, kind: str) -> None:
    run = make_run("learner.ranks=2", f"timeouts.start_s={DEADLINE_S}")
    with process(make_slowly, shared, 40, str(run.folder)) as rank_0:
        assert [told(rank_0), told(rank_0)] == ["it is being made", "it stands still"]
        assert 39 * PIECE < made_bytes(run) < 40 * PIECE and made_bytes(make_run()) == 0  # that of another run
        with pytest.raises(WaitExpired, match="rank 0 to make"):
            open_other(run, kind)


def test_all_of_a_file_is_made_and_filled_piece_by_piece(
    make_run: MakeRun, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_file, "_PIECE", PIECE)
    run = make_run()
    before = SlotsFile.create(run, MANIFEST)
    for slot in range(run.config.weights.slots):
        view = np.frombuffer(before.view(slot), np.uint8)
        view[:] = np.random.default_rng(slot).integers(0, 256, len(view), np.uint8)

    advanced: list[int] = []
    again = SlotsFile.create(run, MANIFEST, before, advanced.append)
    assert all(again.view(slot) == before.view(slot) for slot in range(run.config.weights.slots))
    assert max(advanced) == PIECE and sum(advanced) > 3 * run.config.weights.slots * MANIFEST.total_bytes
    assert made_bytes(run) == 0
    before.close()
    again.close()


def test_what_a_file_had_before_the_room_ended_counts_as_free(
    make_run: MakeRun, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm_file, "_PIECE", PIECE)
    allocate = os.posix_fallocate

    def until_full(descriptor: int, at: int, length: int) -> None:
        if at >= 3 * PIECE:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, at, length)

    def available() -> int:
        return 1_000_000_000 if holds_one(shared) else 5_000_000_000

    monkeypatch.setattr(os, "posix_fallocate", until_full)
    monkeypatch.setattr(shm_file, "_available_bytes", available)
    with pytest.raises(ConfigError, match=r"5\.00 GB free"):
        SlotsFile.create(make_run(), MANIFEST)


def holds_one(folder: Path) -> bool:
    """Whether this process has a file open that is, or was, in the folder."""
    descriptors = [Path("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
    return any(os.readlink(each).startswith(f"{folder}/") for each in descriptors if each.is_symlink())
