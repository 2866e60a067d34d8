"""Where metrics go: `metrics.jsonl` in the run's folder, and a dashboard.

One row per training step, merged from every process; evaluation rows carry the step of their version.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Dashboard:
    """What people look at; this one shows nothing.

    No method waits, but `close`; none raises: a run is not lost because a dashboard is away.
    """

    def log(self, step: int, values: dict[str, Any], histograms: dict[str, list[float]]) -> None:
        """A row of metrics."""

    def alert(self, title: str, text: str) -> None:
        """Something that a person should know."""

    def close(self, report: Callable[[], Path] | None) -> None:
        """Send everything, with the run's report, which that call writes."""

    def describe(self) -> dict[str, Any]:
        """What stands in `summary.json`: what was dropped, and why."""
        return {}


class Tracker:
    def __init__(self, folder: Path, dashboard: Dashboard) -> None:
        self.dashboard = dashboard
        self._is_told = False
        self._file = (folder / "metrics.jsonl").open("a", buffering=1)

    def log(self, step: int, values: dict[str, Any], histograms: dict[str, list[float]] | None = None) -> None:
        """Raises OSError where the disk is full."""
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        lists = {name: [each for each in found if math.isfinite(each)] for name, found in (histograms or {}).items()}
        self._file.write(json.dumps({"step": step, "time": time.time()} | finite | lists) + "\n")
        self.dashboard.log(step, values, histograms or {})

    def alert(self, title: str, text: str) -> None:
        self.dashboard.alert(title, text)

    def failure(self) -> str:
        """Why a dashboard does not show the run, the first time that it is asked for; empty where it does."""
        error = "" if self._is_told else str(self.dashboard.describe().get("error", ""))
        self._is_told = self._is_told or bool(error)
        return " ".join(error.split())

    def close(self, deadline_s: float, report: Callable[[], Path] | None = None) -> bool:
        """Flush everything. False if the dashboard did not finish in time: its thread dies with the process."""

        def close_all() -> None:
            with contextlib.suppress(OSError):  # a full disk: the first row that did not fit has ended the run
                self._file.close()
            self.dashboard.close(report)

        closing = threading.Thread(target=close_all, daemon=True)
        closing.start()
        closing.join(deadline_s)
        return not closing.is_alive()
