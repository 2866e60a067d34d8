"""The folder of a run belongs to one run at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from launch.cli import main


def test_a_name_belongs_to_one_run_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "simulated"
    folder.mkdir()
    (folder / "summary.json").write_text("{}")
    with FileLock(folder / "lock"):
        assert main(["run", "simulated", f"runs={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "fresco: name='simulated': a run of this name is going on; choose another name"
    assert (folder / "summary.json").exists(), "the run that is going on keeps its folder"
