"""The browser that opens what is made for readers; tests are skipped where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright


@contextmanager
def chromium() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with sync_playwright() as driver:
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        started = driver.chromium.launch(executable_path=program, args=arguments, timeout=240_000)
        yield started
        started.close()
