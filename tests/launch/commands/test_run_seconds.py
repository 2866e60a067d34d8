"""The seconds of a run count from its start, without the wait for a cache that somebody else fills."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.cli import main
from launch.commands import run as command


@pytest.mark.parametrize("waited", [0.0, 300.0])
def test_a_wait_for_anothers_cache_is_no_second_of_the_run(
    waited: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[float] = []

    def make_run(_: Any, started: float) -> Any:
        starts.append(started)
        return SimpleNamespace(folder=tmp_path, data={}, model_folder=None)

    monkeypatch.setattr(command, "begin_as_copies", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(command, "check", lambda *_, **__: None)
    monkeypatch.setattr(command, "make_run", make_run)
    monkeypatch.setattr(command, "waited_s", lambda: waited)
    monkeypatch.setattr(command, "execute", lambda *_: 0)

    before = time.time()
    assert main(["run", "simulated"]) == 0
    assert before + waited <= starts[0] <= time.time() + waited
