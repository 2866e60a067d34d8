"""The summary's file is valid JSON whatever a run has measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

from launch.summary import write_summary


def test_numbers_that_are_not_finite_never_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    measured = {"first": math.nan, "last": [0.5, -math.inf]}
    write_summary(path, {"alpha": math.inf, "steps": 20, "reward": measured, "error": None})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    kept = json.loads(path.read_text(), parse_constant=refuse)
    assert kept == {"alpha": None, "steps": 20, "reward": {"first": None, "last": [0.5, None]}, "error": None}
