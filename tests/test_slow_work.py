"""What takes longer than a hang, and is none: a checkpoint on a slow disk, and code that is compiled."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.test_sft_end_to_end import command, finish, losses, model, rows

__all__ = ["model", "rows"]

ROOT = Path(__file__).parents[1]
SLOW_DISK = """
import os, time

synced = os.fsync

def fsync(file):
    if os.readlink(f"/proc/self/fd/{file}").endswith("/meta.json"):
        time.sleep(8)
    synced(file)

os.fsync = fsync
"""
"""100 GB, a checkpoint of 8B parameters, take minutes on most disks."""
SLOW_COMPILER = """#!/bin/bash
if mkdir "$0.begun" 2>/dev/null; then
    timeout 25 bash -c "while :; do :; done"
    touch "$0.done"
fi
exec g++ "$@"
"""
"""A layer of a large model takes tens of seconds, in which the processor is used."""
PATIENCE_S = 240


def begin(command: list[str], hang_s: int, **environment: Any) -> subprocess.Popen[str]:
    """A run that ends at the first hang."""
    return subprocess.Popen(
        [*command, f"timeouts.hang_s={hang_s}", "max_restarts=0"],
        cwd=ROOT,
        env=os.environ | {name: str(value) for name, value in environment.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_slow_save_is_no_hang(rows: Path, model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    finish(begin(command(rows, model, tmp_path, "steps=1"), 4, PYTHONPATH=f"{tmp_path}:{ROOT}"))
    assert len(losses(tmp_path)) == 1
    assert (tmp_path / "sft" / "checkpoints" / "step-1").is_dir() and (tmp_path / "sft" / "model").is_dir()


@pytest.mark.docs
def test_code_that_is_compiled_is_no_hang(rows: Path, model: Path, tmp_path: Path) -> None:
    """Nothing was compiled before. What else a step does has time also on a busy machine. The kernels after the first
    one are not waited for: they are many."""
    compiler = tmp_path / "compiler"
    compiler.write_text(SLOW_COMPILER)
    compiler.chmod(0o755)
    cold = {"TORCHINDUCTOR_CACHE_DIR": tmp_path / "cold", "CXX": compiler}
    settings = ("steps=1", "learner.compile=true", "--held-out", "0")  # nothing is compiled before the step
    process = begin(command(rows, model, tmp_path, *settings), 12, **cold)

    done = Path(f"{compiler}.done")
    until = time.monotonic() + PATIENCE_S
    while process.poll() is None and not done.exists() and time.monotonic() < until:
        time.sleep(0.1)
    ended = process.poll()
    process.kill()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert ended is None and done.exists(), output[-4000:]
