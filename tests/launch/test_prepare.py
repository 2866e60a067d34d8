"""The child that prepares a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

STARTER = """
from launch.prepare import prepare
from rl.core.config import Config
prepare(Config.model_validate({"model": {"path": "tiny", "tiny": {"sft_steps": 100000}}}))
"""


def test_it_ends_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESCO_CACHE", str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", STARTER], stderr=subprocess.PIPE)
    assert parent.stderr is not None and b"warm start" in parent.stderr.readline()  # the child is at work
    (child,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait(60)
    gone, _ = psutil.wait_procs([child], timeout=240)
    assert gone
