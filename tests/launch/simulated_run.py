"""A short finished run of real processes, with simulated engines and learner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def simulated_run(runs: Path, *overrides: str) -> Path:
    """The folder of a run of three steps that kept every group."""
    changes = [f"runs={runs}", "steps=3", "eval.tasks=4", "tracking.samples=1", *overrides]
    command = [sys.executable, "-m", "launch.cli", "run", "experiments/simulated.yaml", *changes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return runs / "simulated"
