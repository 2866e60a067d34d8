"""One short run of real processes and one browser for every test of the report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.chromium import chromium
from tests.launch.simulated_run import simulated_run


@pytest.fixture(scope="package")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the simulated recipe that kept every group and its whole trace."""
    return simulated_run(tmp_path_factory.mktemp("runs"), "tracking.trace=full")


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started
