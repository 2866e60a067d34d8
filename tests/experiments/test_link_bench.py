"""An update between two machines with a cable of a given rate, as `bench link` measures it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bench import link

ROOT = Path(__file__).parents[2]


def test_without_root_it_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="takes root, and the commands ip and tc"):
        link.main([])
    with pytest.raises(SystemExit, match="--rate=fast: write a number and one of gbit, mbit"):
        link.main(["--rate", "fast"])


@pytest.mark.docs
def test_a_patch_crosses_a_slow_cable_sooner_than_all_of_it(tmp_path: Path) -> None:
    try:
        with link.machines("100mbit"):
            pass
    except SystemExit as error:
        pytest.skip(str(error))

    out = tmp_path / "out.json"
    options = ["--gigabytes", "0.04", "--rate", "100mbit", "--updates", "1", "--out", str(out)]
    command = [sys.executable, "-m", "experiments.bench", "link", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr

    found = json.loads(out.read_text())
    assert found["dense"]["stats"] == {"dense": 2, "dense_bytes": 2 * 1e9 * found["gigabytes"]}
    assert found["delta"]["stats"]["sparse"] == 1
    assert found["delta"]["stats"]["sparse_bytes"] < 0.02 * 1e9 * found["gigabytes"]
    assert found["dense"]["update_s"][0] > 0.9 * found["bound_s"], "the cable has a limit"
    assert found["delta"]["update_s"][0] < 0.5 * found["bound_s"]
