"""Folders that cannot be written, and no shared memory: one line before anything starts, or a run that needs none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="not run: mounting needs root")
READ_ONLY = 'mount -t tmpfs -o ro none "$0" && exec "$@"'

FULL = 'mount -t tmpfs -o size=1500k none "$0" && "$@"; code=$?; cat "$0"/simulated/summary.json; exit $code'


def run(unwritable: Path, recipe: str, *changes: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line where this folder is empty and cannot be written."""
    fresco = [sys.executable, "-m", "launch.cli", "run", f"experiments/{recipe}.yaml", "tracking.wandb=disabled"]
    command = ["unshare", "--mount", "sh", "-c", READ_ONLY, str(unwritable), *fresco, *changes]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | environment)


def test_folders_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    fixed = tmp_path / "fixed"
    fixed.mkdir()
    shm, runs, cache = (
        run(Path("/dev/shm"), "simulated", f"runs={tmp_path}"),
        run(fixed, "simulated", f"runs={fixed / 'runs'}"),
        run(fixed, "math_cpu", f"runs={tmp_path}", FRESCO_CACHE=str(fixed / "cache")),
    )
    assert [each.returncode for each in (shm, runs, cache)] == [2, 2, 2]
    used = "weights.transport='shm': /dev/shm cannot be used (Read-only file system); set weights.transport=zmq"
    assert shm.stderr == f"fresco: {used}\n"
    assert runs.stderr == f"fresco: runs='{fixed}/runs': cannot be written (Read-only file system); choose another\n"
    assert cache.stderr.startswith("fresco: the model cannot be prepared: ") and f"'{fixed}/cache'" in cache.stderr
    assert "FRESCO_CACHE" in cache.stderr and len(cache.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("*/run.json"))


def test_a_run_over_sockets_needs_no_shared_memory(tmp_path: Path) -> None:
    ended = run(Path("/dev/shm"), "simulated", f"runs={tmp_path}", "steps=3", "weights.transport=zmq")
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "simulated" / "summary.json").read_text())["steps"] == 3


def test_a_disk_that_fills_up_ends_the_run_in_one_line_with_its_summary(tmp_path: Path) -> None:
    fresco = [sys.executable, "-m", "launch.cli", "run", "experiments/simulated.yaml", f"runs={tmp_path}"]
    changes = ["steps=100000", "tracking.trace=full", "weights.transport=zmq"]
    command = ["unshare", "--mount", "sh", "-c", FULL, str(tmp_path), *fresco, *changes]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 1 and "Traceback" not in ended.stdout + ended.stderr

    shown, _, summary_text = ended.stdout.partition("\n{\n")
    summary = json.loads("{" + summary_text)
    line = (ended.stderr or shown).splitlines()[-1]
    assert line.startswith("fresco: ") and "No space left on device" in line and str(tmp_path) in line
    assert "No space left on device" in summary["error"] and summary["steps"] > 0
