"""A run whose sockets any process can speak in says so before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cli import main


@pytest.mark.parametrize(("curve", "warnings"), [("false", 1), ("true", 0)])
def test_sockets_without_keys_are_warned_of(
    curve: str, warnings: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [f"runs={tmp_path}", f"network.curve={curve}"]
    assert main(["run", "simulated", "--dry-run", *overrides]) == 0

    told = [line for line in capsys.readouterr().err.splitlines() if "network.curve" in line]
    assert len(told) == warnings
    assert all("network.curve=false: any process that reaches a socket of this run can speak in it" in t for t in told)
