"""A replay under another commit is not waited for without an end."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.commands.bisect import trail_under
from rl.config.schema import ConfigError


def test_a_commit_that_hangs_is_named_with_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hangs))

    limits = SimpleNamespace(start_s=0.2, hang_s=0.01)
    config = SimpleNamespace(timeouts=limits)
    run: Any = SimpleNamespace(folder=tmp_path / "run", config=config, state_before=lambda step: (None, step - 1))
    with pytest.raises(ConfigError, match=r"replays no step of .*: it did not end within 0\.5 s, by timeouts\.start_s"):
        trail_under("", run, 4, 6)
