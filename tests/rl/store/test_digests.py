"""A flipped byte, a truncated or a missing file of a checkpoint, an export or a cache is found before it is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.prepare import prepare
from rl.config.schema import Config, ConfigError
from rl.store.checkpoint_folder import CheckpointError, Meta, begin, commit, verify
from rl.store.digests import DIGESTS, damage, write_digests
from rl.store.made_once import made_once


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = [flip, truncate, Path.unlink]


def save_checkpoint(folder: Path, step: int) -> Path:
    state = begin(folder, step) / "state"
    state.mkdir()
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (state / name).write_bytes(f"{name} of step {step}".encode() * 100)
    return commit(folder, Meta(step, 0, 2), b"the journal", keep=3)


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("harm", DAMAGES)
def test_any_damaged_file_of_a_checkpoint_is_named_with_one_that_is_whole(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    whole = save_checkpoint(tmp_path / "whole", 4)
    names = [path.relative_to(whole) for path in files_of(whole)]
    assert len(names) == 6

    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        older = save_checkpoint(folder, 2)
        newest = save_checkpoint(folder, 4)
        assert verify(newest) == Meta(4, 0, 2)

        harm(newest / name)
        with pytest.raises(CheckpointError) as raised:
            verify(newest)
        told = str(raised.value)
        blamed = newest / name
        assert str(blamed) in told and f"resume={older} is whole" in told and "\n" not in told

        flip(older / "journal.msgpack")
        with pytest.raises(CheckpointError, match="no other checkpoint beside it is whole: begin anew"):
            verify(newest)


def test_a_dropped_entry_is_noticed(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, 4)
    written = json.loads((saved / DIGESTS).read_bytes())
    for name in written.keys() - {"*"}:
        (saved / DIGESTS).write_text(json.dumps({other: written[other] for other in written if other != name}))
        with pytest.raises(CheckpointError, match=rf"{DIGESTS} was damaged"):
            verify(saved)


def test_a_checkpoint_that_was_moved_elsewhere_is_verified_too(tmp_path: Path) -> None:
    moved = save_checkpoint(tmp_path, 2).rename(tmp_path / "the best one")
    assert verify(moved) == Meta(2, 0, 2)
    flip(moved / "state" / "__1_0.distcp")
    with pytest.raises(CheckpointError, match=r"the best one/state/__1_0\.distcp was damaged"):
        verify(moved)


@pytest.mark.parametrize("harm", DAMAGES)
def test_a_damaged_cache_is_made_again(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    made: list[Path] = []

    def make(draft: Path) -> None:
        (draft / "deep").mkdir(parents=True)
        (draft / "deep" / "weights").write_bytes(b"0123456789")
        (draft / "config").write_bytes(b"{}")
        made.append(draft)

    target = made_once(tmp_path / "thing", make)
    for count, name in enumerate(("thing/deep/weights", "thing/config", "thing.digests")):
        harm(tmp_path / name)
        made_once(target, make)
        assert len(made) == count + 2
        assert (target / "deep" / "weights").read_bytes() == b"0123456789"

    (target / "later").write_text("files that came later are nobody's to judge")
    assert made_once(target, make) == target and len(made) == 4


def test_a_damaged_cache_of_one_file_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = made_once(tmp_path / "tasks.jsonl", lambda draft: draft.write_text("a task"))
    flip(target)
    made_once(target, lambda draft: draft.write_text("a task"))
    assert target.read_text() == "a task" and "tasks.jsonl is made again" in capsys.readouterr().err


def test_a_damaged_model_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    write_digests(tmp_path, tmp_path / DIGESTS)
    flip(tmp_path / "model.safetensors")
    assert damage(tmp_path, tmp_path / DIGESTS) == tmp_path / "model.safetensors"

    config = Config.model_validate({"model": {"path": str(tmp_path)}})
    with pytest.raises(ConfigError, match=r"model\.safetensors was damaged or removed since the model was exported"):
        prepare(config)


@pytest.mark.parametrize("content", ["{}", "[]", "null"])
def test_digests_of_nothing_are_damaged_digests(tmp_path: Path, content: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / DIGESTS).write_text(content)
    assert damage(tmp_path, tmp_path / DIGESTS) == tmp_path / DIGESTS
