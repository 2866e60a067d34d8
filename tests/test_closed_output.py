"""A run whose output goes nowhere, or whose terminal is gone, ends in order: a summary, and no process left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

COMMAND = [sys.executable, "-m", "launch.cli", "run", "experiments/simulated.yaml", "steps=100000", "eval.tasks=0"]
COMMAND += ["timeouts.stop_s=60"]


def start(output: Path, runs: Path) -> psutil.Popen:
    """In a session of its own, as after `setsid`; `nohup` would have it ignore SIGHUP."""
    with output.open("wb") as file:
        command = [*COMMAND, f"runs={runs}", "name=closed"]
        return psutil.Popen(command, stdout=file, stderr=subprocess.PIPE, start_new_session=True)


def ended(process: psutil.Popen, runs: Path) -> tuple[int, str, dict[str, object]]:
    """Exit code, standard error and summary; whatever happens, no process stays."""
    try:
        _, error = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, as it should
            process.kill()

    summary = runs / "closed" / "summary.json"
    return process.returncode, error.decode(), json.loads(summary.read_text()) if summary.exists() else {}


def test_hanging_up_ends_a_run_whose_output_is_a_file(tmp_path: Path) -> None:
    process = start(tmp_path / "output", tmp_path)
    metrics = tmp_path / "closed" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)

    children = process.children(recursive=True)
    os.kill(process.pid, signal.SIGHUP)
    code, error, summary = ended(process, tmp_path)
    assert (code, error) == (130, "") and summary["freshness_violations"] == 0
    assert "interrupted; every process has ended" in (tmp_path / "output").read_text()
    assert not psutil.wait_procs(children, timeout=240)[1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_output_is_one_line(tmp_path: Path) -> None:
    process = start(Path("/dev/full"), tmp_path)
    code, error, _ = ended(process, tmp_path)
    assert code == 1 and "No space left on device" in error
    assert "Traceback" not in error and len(error.splitlines()) == 1
