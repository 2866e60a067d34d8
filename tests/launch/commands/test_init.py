"""`fresco init`: a folder outside of the repository with which a run works as it is, from wherever it is started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import preflight
from launch.cli import main
from launch.prepare import Prepared
from rl.config.schema import Config, load_config


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """What the preflight would prepare a model for."""
    seen: list[Config] = []

    def prepare(config: Config, *, make: bool, begin: object) -> Prepared:
        seen.append(config)
        return Prepared(None, 0)

    monkeypatch.setattr(preflight, "prepare", prepare)
    return seen


def test_its_recipe_is_valid_from_any_folder(
    tmp_path: Path, checked: list[Config], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my task"]) == 0
    told = capsys.readouterr().out
    for command in ("python -m pytest 'my task'", "fresco run 'my task/recipe.yaml'", "fresco show"):
        assert command in told

    assert main(["run", "my task/recipe.yaml", "--dry-run"]) == 0
    (config,) = checked
    assert config.name == "my_task" and config.runs == tmp_path / "my task" / "runs"
    assert not config.runs.exists()


def test_its_own_test_holds_and_finds_a_reward_that_pays_for_anything(tmp_path: Path) -> None:
    folder = tmp_path / "task"
    assert main(["init", str(folder)]) == 0
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    assert subprocess.run(command, cwd=tmp_path, timeout=120).returncode == 0
    reward = folder / "reward.py"
    reward.write_text(f"{reward.read_text()}\n\ndef right(response, row):\n    return 1.0\n")
    assert subprocess.run(command, cwd=tmp_path, timeout=120, capture_output=True).returncode == 1


def test_its_reward_has_five_lines_and_its_rows_are_certified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "task"
    main(["init", str(folder)])
    body = [line for line in (folder / "reward.py").read_text().split("def ")[1].splitlines() if line.strip()]
    assert len(body) == 5
    assert len({json.loads(line)["prompt"] for line in (folder / "rows.jsonl").open()}) == 1000

    check = ["env", "check", "dataset", "--short", "--recipe", str(folder / "recipe.yaml")]
    assert main(check) == 0, capsys.readouterr().out


def test_a_model_of_the_users_own_is_not_warm_started(
    tmp_path: Path, checked: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine: 7B").mkdir()
    assert main(["init", "folder", "--model", "mine: 7B"]) == 0
    assert main(["init", "hub", "--model", "Qwen/Qwen3-0.6B"]) == 0
    folder, hub = (load_config(f"{name}/recipe.yaml") for name in ("folder", "hub"))
    assert folder.model.path == str(tmp_path / "mine: 7B") and hub.model.path == "Qwen/Qwen3-0.6B"
    assert folder.model.warm_start.demonstrations == hub.model.warm_start.demonstrations == 0


def test_a_folder_that_cannot_be_made_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "/proc/mine"]) == 2
    assert capsys.readouterr().err == "fresco: '/proc/mine': No such file or directory; name another one\n"


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    assert main(["init", str(tmp_path)]) == main(["init", str(tmp_path / "kept.txt")]) == 2
    assert capsys.readouterr().err.count("is no empty folder, and nothing in it is overwritten; name a new one") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
