"""The files that a run begins with, as an agent takes them: what nobody wants is dropped, what never comes whole is no
progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.agent import Files
from launch.launcher.folders import TRIES
from launch.launcher.node_messages import Ask, File, Part
from rl.store.digests import file_digest
from tests.conftest import MakeRun

WHOLE = b"0123456789"
NAME = "model/config.json"


@pytest.fixture
def files(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """They want one file, of which nothing is here."""
    monkeypatch.setenv("FRESCO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "there").write_bytes(WHOLE)
    run = make_run().model_copy(update={"model_folder": tmp_path / "model"})
    found = Files(run, {NAME: File(len(WHOLE), file_digest(tmp_path / "there"))}, "me")
    found.want("learner")
    assert found.ask(0.0) == Ask(NAME, 0)
    return found


def test_a_late_part_is_dropped(files: Files, tmp_path: Path) -> None:
    """It was asked for twice after some seconds of silence, and both answers have come."""
    files.take(Part("checkpoints/step-4/state/__0_0.distcp", 0, WHOLE))
    assert files.came == 0 and not files.are_there("learner")
    files.take(Part(NAME, 0, WHOLE))
    assert files.came == 1 and files.are_there("learner")

    files.take(Part(NAME, 0, WHOLE))  # likewise
    (folder,) = (tmp_path / "cache" / "from_head").iterdir()
    assert [path.name for path in folder.iterdir()] == ["config.json"]


def test_a_file_that_the_head_has_changed_is_no_progress_in_the_end_and_the_cause_is_told(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2 * TRIES):
        files.take(Part(NAME, 0, WHOLE[::-1]))
        assert files.ask(0.0) == Ask(NAME, 0)
    assert files.came == TRIES
    assert capsys.readouterr().err == f"! the head's {NAME} was changed since the run began\n"


def test_a_file_that_has_become_shorter_is_asked_for_now_and_then(files: Files) -> None:
    files.take(Part(NAME, 0, WHOLE[:4]))
    assert files.ask(1.0) == Ask(NAME, 4)
    files.take(Part(NAME, 4, b""))
    assert files.ask(1.0) is None and files.ask(9.0) == Ask(NAME, 4)
    assert files.came == 1
    files.take(Part(NAME, 4, WHOLE[4:]))
    assert files.are_there("learner")


@pytest.mark.parametrize(
    ("lora", "weights"),
    [
        ([], False),
        (["model.lora={rank: 4, alpha: 8}"], False),
        (["model.lora={rank: 4, alpha: 8, serve: adapter}"], True),
    ],
    ids=["in full", "merged", "adapter"],
)
def test_an_engine_has_the_weights_below_an_adapter_and_waits_for_no_others(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: list[str], weights: bool
) -> None:
    """They come behind all small files, whoever wanted them first."""
    monkeypatch.setenv("FRESCO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "there").write_bytes(WHOLE)
    file = File(len(WHOLE), file_digest(tmp_path / "there"))
    folders = {"model_folder": tmp_path / "model", "teacher_folder": tmp_path / "teacher"}
    run = make_run(*lora).model_copy(update=folders)
    names = ["teacher/a.safetensors", "model/a.safetensors", "model/b.safetensors", "model/tokenizer.json"]
    files = Files(run, dict.fromkeys(names, file), "me")

    for role in ("teacher", "learner", "generator", "env_server"):
        files.want(role)
    came = []
    for name in ("model/tokenizer.json", "teacher/a.safetensors", "model/a.safetensors", "model/b.safetensors"):
        assert files.ask(0.0) == Ask(name, 0)
        files.take(Part(name, 0, WHOLE))
        came.append({role for role in ("generator", "env_server", "teacher", "learner") if files.are_there(role)})
    small = {"env_server"} if weights else {"env_server", "generator"}
    assert came == [small, small | {"teacher"}, small | {"teacher"}, small | {"teacher", "learner", "generator"}]


def test_a_file_that_is_coming_is_not_put_off(files: Files) -> None:
    files.take(Part(NAME, 0, WHOLE[:4]))
    files.want("learner")
    assert files.ask(0.0) == Ask(NAME, 4)


def test_an_empty_file_comes_as_any(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESCO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "there").write_bytes(b"")
    run = make_run().model_copy(update={"model_folder": tmp_path / "model"})
    files = Files(run, {NAME: File(0, file_digest(tmp_path / "there"))}, "me")
    files.want("learner")
    files.take(Part(NAME, 0, b""))
    assert files.are_there("learner")
