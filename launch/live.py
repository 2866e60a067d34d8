"""What the terminal shows: one table that stays in place, or one line per step where it is not a terminal."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from launch.summary import Children, Observed
from rl.core.run import RunFile

_REFRESH_S = 0.5


class Display:
    """What the supervisor shows while it watches."""

    def __init__(self, run: RunFile, observed: Observed) -> None:
        self._run = run
        self._observed = observed
        self._last_step = run.start_step + run.config.steps
        self._console = Console(highlight=False, soft_wrap=True)
        self._notes: list[str] = []
        self._row: dict[str, float] = {}
        self._times: deque[float] = deque(maxlen=20)  # when the last steps ended
        self._drawn = 0.0

        self._live: Live | None = None
        if run.config.tracking.live and sys.stdout.isatty():
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def row(self, step: int, values: dict[str, float]) -> None:
        """A new metrics row."""
        if "eval/accuracy" in values:
            self._print(f"step {step:4d}  held-out accuracy {values['eval/accuracy']:.3f}")
        if "train/loss" in values:
            self._row = values
            self._times.append(time.monotonic())
            self._print(self._line(step, values))

    def note(self, text: str) -> None:
        """Something the user should know, kept on the screen."""
        self._notes.append(text)
        self._print(f"! {text}")

    def refresh(self, children: Children) -> None:
        """Draw the table, where the terminal is one and the last drawing is old enough."""
        now = time.monotonic()
        if self._live is None or now - self._drawn < _REFRESH_S:
            return
        self._drawn = now
        self._live.update(self._table(children), refresh=True)

    def ending(self, reason: str) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        self._print(f"ending: {reason}")

    def close(self, summary: dict[str, Any], error: Exception | None, interrupted: bool) -> None:
        """The first cause of a failure with its `detail`, or what came out."""
        if error is not None:
            if detail := getattr(error, "detail", ""):
                self._console.print(detail.rstrip(), markup=False)
            self._console.print(f"fresco: {error}", markup=False, style="bold red")
            return
        if interrupted:
            self._print("interrupted; every process has ended")
            return

        if accuracy := summary["eval"]:
            self._print(f"held-out accuracy {accuracy['first']:.3f} -> {accuracy['last']:.3f}")
        self._print(f"summary: {self._run.folder / 'summary.json'}")

    def _print(self, text: str) -> None:
        if self._live is None:
            self._console.print(text, markup=False)

    def _remaining(self) -> str:
        """From the pace of the last steps; the start of the processes says nothing about it."""
        if len(self._times) < 2:
            return "?"

        pace_s = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        seconds = pace_s * (self._last_step - self._observed.step)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d}"

    def _line(self, step: int, values: dict[str, float]) -> str:
        unknown = float("nan")
        return (
            f"step {step:4d}/{self._last_step}  reward {values.get('rollout/reward', unknown):.3f}  "
            f"loss {values['train/loss']:+.4f}  kl {values.get('loss/kl_behavior', unknown):.4f}  "
            f"entropy {values.get('loss/entropy', unknown):.3f}  stale {values.get('staleness/mean', 0.0):.2f}  "
            f"{values.get('tokens_per_second', 0.0):5.0f} tok/s  {values.get('time/step', 0.0):.2f} s/step  "
            f"left {self._remaining()}"
        )

    def _table(self, children: Children) -> Table:
        elapsed_s = time.time() - self._observed.started_at
        step = self._observed.step
        title = f"{self._run.config.name}  step {step}/{self._last_step}  {elapsed_s:.0f} s, left {self._remaining()}"
        table = Table("process", "state", "waited for (s)", title=title)

        for child in children.values():
            state = "starting" if not child.registered else "busy" if child.beat.busy else "idle"
            waits = ", ".join(f"{whom} {seconds:.0f}" for whom, seconds in child.beat.waits.items())
            table.add_row(child.name, state, waits)

        if self._row:
            table.add_row("[bold]last step[/bold]", "", self._line(step, self._row))
        for evaluated, accuracy in self._observed.evals[-3:]:
            table.add_row("held-out", f"step {evaluated}", f"{accuracy:.3f}")
        for text in self._notes[-3:]:
            table.add_row("!", "", text)
        return table
