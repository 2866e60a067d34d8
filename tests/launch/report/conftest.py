"""One short run of real processes and one browser for every test of the report."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.launch.simulated_run import simulated_run


@pytest.fixture(scope="package")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the simulated recipe that kept every group and its whole trace."""
    return simulated_run(tmp_path_factory.mktemp("runs"), "tracking.trace=full")


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
