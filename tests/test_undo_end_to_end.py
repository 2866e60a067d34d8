"""A run that goes on is taken back to a checkpoint: engines stay up, and its books close."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from launch.cli import main
from rl.store.batch_files import read_batch_parts
from tests.test_end_to_end_simulated import check_books, finish, metrics_rows, start, wait_for_step

STEPS = 60


def test_a_live_run_goes_back_and_closes_its_books(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("learner.ranks=1", "learner.checkpoint_every=16", "learner.options.step_s=0.3", "tracking.replay=full")
    process = start(tmp_path, f"steps={STEPS}", *settings, "timeouts.heartbeat_s=0.1")
    folder = tmp_path / "simulated"
    wait_for_step(tmp_path, 18)

    assert main(["undo", str(folder), "--to", "12"]) == 2
    assert "goes back to one of its two newest checkpoints: 16" in capsys.readouterr().err
    assert main(["set", str(folder), "rollout.alpha=2"]) == 2
    assert "it cannot change while a run goes on; what can is learner.lr" in capsys.readouterr().err

    begin = time.thread_time()
    assert main(["undo", str(folder), "--to", "16"]) == 0
    assert time.thread_time() - begin < 2
    assert "version 16 is the newest again, in timeline 1" in capsys.readouterr().out

    check_books(finish(process, tmp_path), STEPS)
    logs = [path.name for path in (folder / "logs").iterdir()]
    assert logs and all(name.split(".")[-2] == "0" for name in logs)  # nobody was started again

    versions = [json.loads(line) for line in (folder / "versions.jsonl").read_text().splitlines()]
    assert [line["n"] for line in versions if line["timeline"] == 1] == [*range(16, STEPS + 1)]
    parts = list(read_batch_parts(folder))
    assert [part.timeline for part in parts] == [0] * 16 + [1] * (STEPS - 16)
    samples = [row.sample_id for part in parts for row in part.rows]
    assert len(samples) == len(set(samples)) == STEPS * 16

    rows = [row for row in metrics_rows(tmp_path) if row.get("version/timeline") == 1]
    assert [row["step"] for row in rows if "train/loss" in row] == [*range(17, STEPS + 1)]


def test_a_run_that_has_ended_takes_no_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(start(tmp_path, "steps=2"), tmp_path)
    assert main(["undo", str(tmp_path / "simulated"), "--to", "2"]) == 2
    assert "it does not go on" in capsys.readouterr().err
