"""What the terminal shows: one table that stays in place, or one line per step where it is not a terminal."""

from __future__ import annotations

import sys
import time
from collections import deque

from rich.console import Console
from rich.live import Live
from rich.table import Table

from launch.children import Child
from launch.summary import Observed
from rl.core.config import Config
from rl.core.run import RunFile

_REFRESH_S = 0.5


class Display:
    def __init__(self, config: Config, run: RunFile) -> None:
        self._config, self._run = config, run
        self._console = Console(highlight=False, soft_wrap=True)
        self._notes: list[str] = []
        self._row: dict[str, float] = {}
        self._eval: dict[int, float] = {}
        self._step = run.start_step
        self._times: deque[float] = deque(maxlen=20)  # when the last steps ended
        self._drawn = 0.0
        live = config.tracking.live and sys.stdout.isatty()
        self._live = Live(console=self._console, auto_refresh=False) if live else None
        if self._live:
            self._live.start()

    def row(self, step: int, values: dict[str, float]) -> None:
        """A new metrics row."""
        if "eval/accuracy" in values:
            self._eval[step] = values["eval/accuracy"]
            self._print(f"step {step:4d}  held-out accuracy {values['eval/accuracy']:.3f}")
        if "train/loss" in values:
            self._step, self._row = step, values
            self._times.append(time.monotonic())
            self._print(self._line(step, values))

    def note(self, text: str) -> None:
        """Something the user should know, kept on the screen."""
        self._notes.append(text)
        self._print(f"! {text}")

    def refresh(self, observed: Observed, children: dict[tuple[str, int], Child]) -> None:
        now = time.monotonic()
        if self._live is None or now - self._drawn < _REFRESH_S:
            return
        self._drawn = now
        self._live.update(self._table(observed, children), refresh=True)

    def ending(self, reason: str) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        self._print(f"ending: {reason}")

    def close(self, summary: dict[str, object], error: Exception | None, interrupted: bool) -> None:
        if error is not None:
            detail = getattr(error, "detail", "")
            if detail:
                self._console.print(detail.rstrip(), markup=False)
            self._console.print(f"fresco: {error}", markup=False, style="bold red")
            return
        if interrupted:
            self._print("interrupted; every process has ended")
            return
        evaluation = summary.get("eval")
        if isinstance(evaluation, dict):
            self._print(f"held-out accuracy {evaluation['first']:.3f} -> {evaluation['last']:.3f}")
        self._print(f"summary: {self._run.folder / 'summary.json'}")

    def _print(self, text: str) -> None:
        if self._live is None:
            self._console.print(text, markup=False)

    def _remaining(self) -> str:
        """From the pace of the last steps; the start of the processes says nothing about it."""
        if len(self._times) < 2:
            return "?"
        pace_s = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        seconds = pace_s * (self._run.start_step + self._config.steps - self._step)
        return f"{int(seconds // 60)}:{int(seconds % 60):02d}"

    def _line(self, step: int, values: dict[str, float]) -> str:
        last = self._run.start_step + self._config.steps
        return (
            f"step {step:4d}/{last}  reward {values.get('rollout/reward', float('nan')):.3f}  "
            f"loss {values['train/loss']:+.4f}  kl {values.get('loss/kl_behavior', float('nan')):.4f}  "
            f"entropy {values.get('loss/entropy', float('nan')):.3f}  stale {values.get('staleness/mean', 0.0):.2f}  "
            f"{values.get('tokens_per_second', 0.0):5.0f} tok/s  {values.get('time/step', 0.0):.2f} s/step  "
            f"left {self._remaining()}"
        )

    def _table(self, observed: Observed, children: dict[tuple[str, int], Child]) -> Table:
        elapsed = time.time() - observed.started_at
        last = self._run.start_step + self._config.steps
        table = Table(title=f"{self._config.name}  step {self._step}/{last}  {elapsed:.0f} s, left {self._remaining()}")
        table.add_column("process")
        table.add_column("state")
        table.add_column("waited for (s)")
        for child in children.values():
            state = "starting" if not child.registered else "busy" if child.busy else "idle"
            waits = ", ".join(f"{whom} {seconds:.0f}" for whom, seconds in child.waits.items())
            table.add_row(child.name, state, waits)
        if self._row:
            table.add_row("[bold]last step[/bold]", "", self._line(self._step, self._row))
        for step, accuracy in list(self._eval.items())[-3:]:
            table.add_row("held-out", f"step {step}", f"{accuracy:.3f}")
        for text in self._notes[-3:]:
            table.add_row("!", "", text)
        return table
