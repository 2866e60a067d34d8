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


def test_an_empty_file_comes_as_any(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESCO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "there").write_bytes(b"")
    run = make_run().model_copy(update={"model_folder": tmp_path / "model"})
    files = Files(run, {NAME: File(0, file_digest(tmp_path / "there"))}, "me")
    files.want("learner")
    files.take(Part(NAME, 0, b""))
    assert files.are_there("learner")
