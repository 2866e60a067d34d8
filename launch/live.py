"""What the terminal shows: one table that stays in place, or one line per step where it is not a terminal."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launch.summary import Children, Observed, told_wait
from launch.terminal import CleanConsole, say
from rl.store.checkpoint_folder import latest, read_meta
from rl.wire.run import RunFile

_REFRESH_S = 0.5
_SHOWN = (
    ("reward", "rollout/reward", "z.3f"),
    ("loss", "train/loss", "+z.4f"),
    ("kl", "loss/kl_behavior", "z.4f"),
    ("entropy", "loss/entropy", ".3f"),
    ("stale", "staleness/mean", ".2f"),
)


class Display:
    """What the supervisor shows while it watches."""

    def __init__(self, run: RunFile, observed: Observed) -> None:
        self._run = run
        self._observed = observed
        self._last_step = run.last_step
        self._console = CleanConsole(highlight=False, soft_wrap=True)
        self._notes: list[str] = []
        self._row: dict[str, float] = {}
        self._times: deque[float] = deque(maxlen=20)  # when the last steps ended
        self._drawn = 0.0
        self._children: Children = {}

        self._live: Live | None = None
        if sys.stdout.isatty():
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def mute(self) -> None:
        """Write no more, because nobody reads."""
        self._console.quiet = True

    def row(self, step: int, values: dict[str, float]) -> None:
        """A new metrics row."""
        if "eval/accuracy" in values:
            self._print(f"step {step:4d}  held-out accuracy {values['eval/accuracy']:.3f}")
        if "eval/loss" in values:
            self._print(f"step {step:4d}  held-out loss {values['eval/loss']:.4f}")
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
        self._children = children
        self._live.update(self._table(children), refresh=True)

    def ending(self, reason: str) -> None:
        """The last table stays on the screen, with the last evaluation in it."""
        if self._live:
            self._live.update(self._table(self._children), refresh=True)
            self._live.stop()
            self._live = None
        self._print(f"ending: {reason}")

    def close(self, summary: dict[str, Any], error: Exception | None, interrupted: bool) -> None:
        """The first cause of a failure with its `detail`, or what came out."""
        if error is not None and self._console.quiet:  # rich has found the pipe broken
            say(f"fresco: {error}", sys.stderr)
        if error is not None:
            if detail := getattr(error, "detail", ""):
                self._console.print(detail.rstrip(), markup=False)
            self._console.print(f"fresco: {error}", markup=False, style="bold red")
            return
        if interrupted:
            self._print("interrupted; every process has ended")
            if (newest := latest(self._run.folder / "checkpoints")) is not None:
                self._print(f"to go on from step {read_meta(newest).step}: the same command, or resume=auto")
            return

        if accuracy := summary["eval"]:
            self._print(f"held-out accuracy {accuracy['first']:.3f} -> {accuracy['last']:.3f}")
        if longest := self._observed.longest_wait():
            self._print(f"longest wait: {told_wait(*longest)}")
        if loss := summary.get("held_out_loss"):
            self._print(f"held-out loss {loss['first']:.4f} -> {loss['last']:.4f}")
        self._print(f"summary: {self._run.folder / 'summary.json'}")

    def _print(self, text: str) -> None:
        if self._live is None:
            self._console.print(text, markup=False)

    def _remaining(self) -> str:
        """The time that is left, from the pace of the last steps; the start of the processes says nothing about it."""
        if len(self._times) < 2:
            return "?"

        pace_s = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        seconds = pace_s * (self._last_step - self._observed.step)
        if (limit_s := self._run.config.seconds) is not None:
            seconds = min(seconds, limit_s * max(0.0, 1 - self._row["time/over"]))
        return clock(seconds)

    def _line(self, step: int, values: dict[str, float]) -> str:
        parts = [f"{label} {values[name]:{form}}" for label, name, form in _SHOWN if name in values]
        return (
            f"step {step:4d}/{self._last_step}  {'  '.join(parts)}  {values.get('tokens_per_second', 0.0):5.0f} tok/s  "
            f"{values.get('time/step', 0.0):.2f} s/step  left {self._remaining()}"
        )

    def _table(self, children: Children) -> Group:
        """What matters most first, one row for each role: complete on a screen of 80 by 24."""
        observed = self._observed
        row = self._row
        elapsed = clock(time.time() - observed.started_at)
        title = f"{self._run.config.name}  step {observed.step}/{self._last_step}  {elapsed}, left {self._remaining()}"

        held_out = [f"{accuracy:.3f} (step {step})" for step, accuracy in observed.evals]
        shown = [*held_out[:1], *held_out[1:][-1:]]  # the first and the last
        speed = f"{row.get('tokens_per_second', 0.0):.0f} tokens/s, {row.get('time/step', 0.0):.2f} s a step"
        learning = ["loss/kl_behavior", "loss/entropy", "staleness/mean", "train/grad_norm"]

        known = [f"{label:10}{row[name]:z.3f}" for label, name, _ in _SHOWN[:2] if name in row]
        lines = [
            known[0] if known else "reward    no step yet",
            f"held-out  {' -> '.join(shown) or 'not evaluated yet'}",
            f"speed     {speed}",
            "learning  " + "  ".join(f"{name.partition('/')[2]} {row[name]:.4g}" for name in learning if name in row),
        ]
        notes = [Text(f"! {text}", no_wrap=True, overflow="ellipsis") for text in self._notes[-3:]]
        return Group(Text(title, style="bold"), *lines, _processes(children, observed), *notes)


def _processes(children: Children, observed: Observed) -> Table:
    """One row for each role: how many are in which state, and the longest wait of them."""
    table = Table("processes", "state", "longest wait", expand=False)
    roles: dict[str, list[Any]] = {}
    for child in children.values():
        roles.setdefault(child.name.partition(".")[0], []).append(child)

    for role, members in roles.items():
        states = Counter(
            "starting" if not child.registered else "busy" if child.beat.busy else "idle" for child in members
        )
        waited = ""
        if longest := observed.longest_wait(role):
            who, wait = longest
            waited = f"{who.removeprefix(role)} {wait.whom} {wait.seconds:.1f} s, step {wait.step}"

        name = f"{role} x {len(members)}" if len(members) > 1 else role
        state = ", ".join(f"{count} {state}" if len(members) > 1 else state for state, count in states.items())
        table.add_row(name, state, waited)
    return table


def clock(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"
