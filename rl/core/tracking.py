"""Where metrics go: `metrics.jsonl` in the run's folder, and wandb.

One row per training step, merged from every process; evaluation rows carry the step of their version.
`Tracker.log` never raises for wandb's sake: a run is not lost because a dashboard is away.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from rl.core.config import TrackingConfig


class Sink(Protocol):
    def log(self, step: int, values: dict[str, Any], histograms: dict[str, list[float]]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def log(self, step: int, values: dict[str, Any], histograms: dict[str, list[float]]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": time.time()} | finite | histograms) + "\n")

    def close(self) -> None:
        self._file.close()


class Wandb:
    """wandb with an explicit step metric: a row whose implicit step goes backwards is dropped silently."""

    def __init__(self, mode: str, project: str, folder: Path, name: str, config: dict[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        settings = wandb.Settings(silent=True, console="off")
        asked: Any = mode
        self._run = wandb.init(
            project=project, name=name, dir=str(folder), mode=asked, config=config, settings=settings
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, Any], histograms: dict[str, list[float]]) -> None:
        charts = {key: self._wandb.Histogram(sample) for key, sample in histograms.items() if sample}
        self._run.log({"step": step} | values | charts)

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # its service ends now, in order, not at exit when it has been killed


def wandb_mode(asked: str) -> str:
    """`auto` is online when an account is configured (WANDB_API_KEY or a netrc entry), else offline."""
    if asked != "auto":
        return asked
    import netrc

    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    if os.environ.get("WANDB_API_KEY"):
        return "online"
    try:
        return "online" if netrc.netrc().authenticators("api.wandb.ai") else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


class Tracker:
    def __init__(self, tracking: TrackingConfig, folder: Path, name: str, config: dict[str, Any]) -> None:
        self._sinks: list[Sink] = [JsonLines(folder / "metrics.jsonl")]
        mode = wandb_mode(tracking.wandb)
        if mode != "disabled":
            self._sinks.append(Wandb(mode, tracking.project, folder, name, config))

    def log(self, step: int, values: dict[str, Any], histograms: dict[str, list[float]] | None = None) -> None:
        for sink in self._sinks:
            sink.log(step, values, histograms or {})

    def close(self, deadline_s: float) -> bool:
        """Flush everything. False if a sink did not finish in time; its thread is left to die with the process."""

        def close_all() -> None:
            for sink in self._sinks:
                sink.close()

        closing = threading.Thread(target=close_all, daemon=True)
        closing.start()
        closing.join(deadline_s)
        return not closing.is_alive()
