"""The dashboards that a run can be seen in: wandb, TensorBoard and Trackio, each by its own library.

All methods are called in one thread (`launch/dashboard.py`), which counts what raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl.config.schema import Config, ConfigError, TrackingConfig
from rl.wire.run import RunFile

LIBRARIES = {"tensorboard": "tensorboardX", "trackio": "trackio"}
COLUMNS = ("kind", "version", "task", "group", "reward", "success", "ended by", "tokens", "conversation")
_TALK = "samples/conversations"
Values = dict[str, float]
Histograms = dict[str, list[float]]
Talk = Sequence[list[str | float | bool]]


class Board:
    """What one of them has no place for does nothing there: the terminal, `fresco show` and the report have it."""

    def log(self, step: int, values: Values, histograms: Histograms) -> None:
        """A row, by names that have a group."""

    def conversations(self, step: int, rows: Talk) -> None:
        """Rows of COLUMNS."""

    def alert(self, title: str, text: str) -> None:
        """An alarm, by its name."""

    def report(self, path: Path) -> None:
        """It stands in the run's folder as well."""

    def finish(self) -> None:
        """Send what is left."""


def check_boards(config: Config) -> None:
    """Their libraries are installed. Raises ConfigError."""
    for name in config.tracking.boards:
        if find_spec(LIBRARIES[name]) is None:
            raise ConfigError(
                f"tracking.boards={name}: {LIBRARIES[name]} is not installed; pip install {LIBRARIES[name]}"
            )


class WandbBoard(Board):
    def __init__(self, tracking: TrackingConfig, mode: str, run: RunFile, run_id: str) -> None:
        import wandb

        asked: Any = mode
        identity: dict[str, Any] = {"project": tracking.project, "name": run.config.name, "id": run_id}
        identity |= {"entity": tracking.entity, "group": tracking.group}
        identity |= {"tags": tracking.tags or None, "notes": tracking.notes}
        if mode == "online":
            identity["resume"] = "allow"

        self._wandb = wandb
        self._run = wandb.init(
            **identity,
            dir=str(run.folder),
            mode=asked,
            config=run.config.model_dump(mode="json"),
            settings=wandb.Settings(silent=True, console="off"),
        )

        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # a row whose implicit step goes backwards is dropped silently

    def log(self, step: int, values: Values, histograms: Histograms) -> None:
        drawn = {key: self._wandb.Histogram(sample) for key, sample in histograms.items()}
        self._run.log({"step": step} | values | drawn)

    def conversations(self, step: int, rows: Talk) -> None:
        self._run.log({"step": step, _TALK: self._wandb.Table(list(COLUMNS), list(rows))})

    def alert(self, title: str, text: str) -> None:
        self._run.alert(title, text)

    def report(self, path: Path) -> None:
        artifact = self._wandb.Artifact(f"report-{self._run.id}", "report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # its service ends now, in order, not at exit when it has been killed


class TensorboardBoard(Board):
    """Files in `<run>/tensorboard`. before: rows of the sittings before."""

    def __init__(self, run: RunFile, before: Sequence[tuple[int, Values]]) -> None:
        from tensorboardX import SummaryWriter

        self._writer: Any = SummaryWriter(logdir=str(run.folder / "tensorboard"))
        for step, values in before:
            self.log(step, values, {})

    def log(self, step: int, values: Values, histograms: Histograms) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        for name, sample in histograms.items():
            self._writer.add_histogram(name, sample, step)

    def conversations(self, step: int, rows: Talk) -> None:
        told = "\n\n".join("    " + str(row[-1]).replace("\n", "\n    ") for row in rows)  # as they are, in Markdown
        self._writer.add_text(_TALK, told, step)

    def alert(self, title: str, text: str) -> None:
        self._writer.add_text(f"alarms/{title}", text)

    def finish(self) -> None:
        self._writer.close()


class TrackioBoard(Board):
    """The run of this name in Trackio's project, which a run that goes on continues."""

    def __init__(self, tracking: TrackingConfig, run: RunFile) -> None:
        import trackio

        identity = {"project": tracking.project, "name": run.config.name, "group": tracking.group}
        self._trackio: Any = trackio
        self._trackio.init(**identity, config=run.config.model_dump(mode="json"), resume="allow")

    def log(self, step: int, values: Values, histograms: Histograms) -> None:
        self._trackio.log(values, step=step)

    def finish(self) -> None:
        self._trackio.finish()
