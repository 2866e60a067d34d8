"""A bubblewrap backend per module, and a template. A machine without bubblewrap fails these tests, with the line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.sandbox import missing_for_bubblewrap
from envs.sandbox.bubblewrap import BubblewrapBackend
from tests.envs.sandboxes import world_writable


@pytest.fixture(scope="module")
def backend() -> Iterator[BubblewrapBackend]:
    missing = missing_for_bubblewrap()
    assert not missing, missing
    made = BubblewrapBackend(slots=8, threads=4)
    yield made
    made.close()


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = world_writable(tmp_path / "template")
    for name in ("a.txt", "gone.txt"):
        (folder / name).write_text("original\n")
        (folder / name).chmod(0o666)
    return folder
