"""Batches kept on disk come back with the same bytes, or not at all."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from experiments.bench._measuring import random_batch_part
from rl.config.damage import Damaged
from rl.store.batch_files import drop_unneeded, read_batch_part, read_batch_parts, steps_kept, write_batch_part
from rl.store.checkpoint_folder import Meta, begin, commit
from rl.wire import codec
from rl.wire.messages import encode


def test_what_a_run_drops_while_it_is_read_is_left_out(tmp_path: Path) -> None:
    part = random_batch_part(2, 2, 4, (2, 6), 100)
    for step in range(3):
        write_batch_part(tmp_path, replace(part, step=step))
    parts = read_batch_parts(tmp_path)
    assert next(parts).step == 0
    drop_unneeded(tmp_path, 2, replay="off")
    assert [each.step for each in parts] == [2]


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    batch_part = random_batch_part(2, 2, 4, (2, 6), 100)
    write_batch_part(tmp_path, batch_part)
    assert encode(read_batch_part(tmp_path, batch_part.step, batch_part.rank)) == encode(batch_part)

    (path,) = (tmp_path / "batches").iterdir()
    whole = path.read_bytes()
    for place in random.Random(0).sample(range(len(whole)), 100):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(Damaged, match=f"{path} is damaged"):
            read_batch_part(tmp_path, batch_part.step, batch_part.rank)
    path.write_bytes(whole[:-1])
    with pytest.raises(Damaged, match="damaged"):
        read_batch_part(tmp_path, batch_part.step, batch_part.rank)


@pytest.mark.parametrize("limit", [64, 1 << 26])
def test_a_part_longer_than_a_piece_comes_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    batch_part = random_batch_part(2, 2, 4, (2, 6), 100)
    frames = encode(batch_part)
    monkeypatch.setattr(codec, "PIECE_BYTES", limit)
    write_batch_part(tmp_path, batch_part)
    monkeypatch.undo()
    assert encode(read_batch_part(tmp_path, batch_part.step, batch_part.rank)) == frames

    (path,) = (tmp_path / "batches").iterdir()
    as_before = path.read_bytes()[16:] == msgspec.msgpack.encode(frames)
    assert as_before == (limit == 1 << 26), "a part whose columns fit is written as it always was"


def checkpoint(run_folder: Path, step: int) -> None:
    folder = run_folder / "checkpoints"
    begin(folder, step)
    commit(folder, Meta(step, 0, 1), b"", keep=2)


@pytest.mark.parametrize(
    ("replay", "free", "left"),
    [("off", 1 << 40, [4, 5]), ("recent", 1 << 40, [2, 3, 4, 5]), ("recent", 100, [4, 5]), ("full", 100, [*range(6)])],
)
def test_what_stays_for_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replay: str, free: int, left: list[int]
) -> None:
    """What a learner trains again after its death always does; where the disk is nearly full nothing else."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    batch_part = random_batch_part(2, 2, 4, (2, 6), 100)
    for step in range(6):
        write_batch_part(tmp_path, msgspec.structs.replace(batch_part, step=step))
    drop_unneeded(tmp_path, 0, replay)  # nothing is saved yet
    assert steps_kept(tmp_path) == [*range(6)]

    checkpoint(tmp_path, 2)
    drop_unneeded(tmp_path, 2, replay)
    checkpoint(tmp_path, 4)
    drop_unneeded(tmp_path, 4, replay)
    assert steps_kept(tmp_path) == left


def test_a_run_that_saves_at_its_end_alone_keeps_what_leads_there(tmp_path: Path) -> None:
    batch_part = random_batch_part(2, 2, 4, (2, 6), 100)
    write_batch_part(tmp_path, msgspec.structs.replace(batch_part, step=0))
    checkpoint(tmp_path, 1)
    drop_unneeded(tmp_path, 1, "recent")
    assert steps_kept(tmp_path) == [0]
