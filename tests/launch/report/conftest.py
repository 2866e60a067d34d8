"""One short run of real processes and one browser for every test of the report."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="package")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the simulated recipe that kept every group and its whole trace."""
    folder = tmp_path_factory.mktemp("runs")
    overrides = [f"runs={folder}", "steps=3", "eval.tasks=4", "tracking.samples=1", "tracking.trace=full"]
    command = [sys.executable, "-m", "launch.cli", "run", "experiments/simulated.yaml", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "simulated"


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        started = driver.chromium.launch(executable_path=chromium, args=arguments, timeout=240_000)
        yield started
        started.close()
