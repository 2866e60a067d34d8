"""`fresco top RUN`: what every process of a running run does or waits for now.

It reads the run's folder and nothing else: the run does not know that it is watched. It ends with the run, by q or by
Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

import psutil
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launch.live import clock
from launch.terminal import CleanConsole
from rl.config.damage import readable
from rl.config.schema import ConfigError
from rl.observe import trace_events
from rl.observe.trace import FOLDER, SUFFIX, TraceFile, boot_id
from rl.wire.run import RunFile

_REFRESH_S = 1.0
_TAIL_BYTES = 1 << 17  # of metrics.jsonl: some rows
_NOTES = 4
_ROLES = ("learner", "generator", "env_server", "parsers", "teacher", "proxy", "broker")
_QUEUE = ("queued", "running", "waiting", "batched")


class Watched:
    """One process, as its own file tells of it."""

    def __init__(self, path: Path) -> None:
        self.file = TraceFile(path)
        self.source = self.file.source
        self.notes: deque[str] = deque(maxlen=_NOTES)  # the supervisor's
        self.ended = ""
        self._doing: list[tuple[str, float]] = []  # the learner's open spans, or a weight load, and since when
        self._episodes: dict[int, str] = {}  # by ticket: what it does
        self._pulses: deque[tuple[float, trace_events.Pulse]] = deque(maxlen=5)

    def read_on(self) -> None:
        for at, event in self.file.read():
            self._take(at, event)

    def _take(self, at: float, event: trace_events.TraceEvent) -> None:
        match event:
            case trace_events.Pulse():
                self._pulses.append((at, event))
            case trace_events.SpanBegan(name):
                self._doing.append((name, at))
            case trace_events.SpanEnded():
                del self._doing[-1:]
            case trace_events.LoadBegan(_, version):
                self._doing = [(f"load version {version}", at)]
            case trace_events.LoadEnded():
                self._doing = []

            case trace_events.ResetBegan(ticket):
                self._episodes[ticket] = "reset"
            case trace_events.Requested(ticket):
                self._episodes[ticket] = "generate"
            case trace_events.StepBegan(ticket):
                self._episodes[ticket] = "step"
            case trace_events.EpisodeEnded(ticket):
                self._episodes.pop(ticket, None)

            case trace_events.ProcessDied(role, index, _, how):
                self.notes.append(f"{role}.{index} died: {how}")
            case trace_events.AlarmShown(name, detail):
                self.notes.append(f"alarm {name}: {detail}")
            case trace_events.RunEnded(reason):
                self.ended = reason

    def does(self, now: float) -> str:
        """now: on the file's clock."""
        if self._doing:
            name, since = self._doing[-1]
            return f"{name}, {now - since:.1f} s"
        if self._episodes:
            counts = sorted(Counter(self._episodes.values()).items())
            return f"{len(self._episodes)} episodes: " + ", ".join(f"{count} {what}" for what, count in counts)
        if not self._pulses:
            return "starts"

        stats = self._pulses[-1][1].stats
        if self.source.role == "generator":
            speed = self._rate([pulse.stats.get("tokens", 0.0) for _, pulse in self._pulses])
            return f"{stats.get('running', 0):.0f} requests, {stats.get('held', 0):.0f} held, {speed:.0f} tokens/s"
        queue = [f"{stats[f'queue_{state}']:.0f} {state}" for state in _QUEUE if f"queue_{state}" in stats]
        return ", ".join(queue) or ("busy" if self._pulses[-1][1].busy else "idle")

    def waits(self) -> str:
        """For whom it waits, as a share of the last seconds."""
        if not self._pulses:
            return ""
        whom = sorted(self._pulses[-1][1].waits)
        shares = {name: self._rate([pulse.waits.get(name, 0.0) for _, pulse in self._pulses]) for name in whom}
        return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.01)

    def cpu(self) -> str:
        return f"{self._rate([pulse.cpu_s for _, pulse in self._pulses]):.0%}"

    def _rate(self, values: list[float]) -> float:
        """How much a number that only grows has grown in a second, lately."""
        if len(values) < 2:
            return 0.0
        return (values[-1] - values[0]) / (self._pulses[-1][0] - self._pulses[0][0])


class Watch:
    """All processes of a run, and its last row of metrics. Raises ConfigError where there is nothing to watch."""

    def __init__(self, folder: Path) -> None:
        self._run = RunFile.load(folder)
        if self._run.config.tracking.trace == "off":
            raise ConfigError(f"{str(folder)!r} keeps no trace: tracking.trace=off, use steps or full")
        self._folder = folder
        self._watched: dict[Path, Watched] = {}

    def read_on(self) -> None:
        for path in (self._folder / FOLDER).glob(f"*{SUFFIX}"):
            if path not in self._watched:
                with contextlib.suppress(EOFError):  # it has just been created
                    self._watched[path] = Watched(path)
        for watched in self._watched.values():
            watched.read_on()

    @property
    def ended(self) -> str:
        """Why the run has ended; the empty string: it goes on."""
        for watched in self._watched.values():
            header = watched.file.header
            if watched.source.role == "supervisor":
                is_gone = header.boot == boot_id() and not psutil.pid_exists(header.pid)
                return watched.ended or ("killed" if is_gone else "")
        return ""

    def newest(self) -> list[Watched]:
        """The last incarnation of each process."""
        ordered = sorted(self._watched.values(), key=_order)
        return list({(each.source.role, each.source.index): each for each in ordered}.values())

    def frame(self) -> Group:
        """Complete on a screen of 80 by 24 while there are no more than a dozen processes."""
        row = _last_row(self._folder / "metrics.jsonl")
        config = self._run.config
        step = f"step {row.get('step', self._run.start_step):.0f}/{self._run.last_step}"
        elapsed = clock(time.time() - self._run.started_at)
        title = f"{config.name}  {step}  " + (f"ended: {self.ended}" if self.ended else elapsed)

        names = {"reward": "rollout/reward", "staleness": "staleness/mean", "tokens/s": "tokens_per_second"}
        figures = [f"{name} {row[key]:.4g}" for name, key in names.items() if isinstance(row.get(key), int | float)]

        notes = [note for watched in self._watched.values() for note in watched.notes]
        lines = [Text(f"! {note}", no_wrap=True, overflow="ellipsis") for note in notes]
        return Group(Text(title, style="bold"), "  ".join(figures) or "no step yet", self._table(), *lines)

    def _table(self) -> Table:
        table = Table("process", "does", "waits for", "CPU", expand=False)
        now = time.monotonic()
        for each in self.newest():
            if each.source.role != "supervisor":
                name = f"{each.source.role}.{each.source.index}"
                table.add_row(name, each.does(now), each.waits(), each.cpu())
        return table


def _order(watched: Watched) -> tuple[int, int, int]:
    source = watched.source
    place = _ROLES.index(source.role) if source.role in _ROLES else len(_ROLES)
    return place, source.index, source.incarnation


def _last_row(path: Path) -> dict[str, float | list[float]]:
    """The row of a trained batch, if one is among the last rows."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines(keepends=True)

    for line in reversed(lines):
        if b'"train/loss"' in line and line.startswith(b"{") and line.endswith(b"\n"):
            for row in readable([line], dict[str, float | list[float]]):
                return row
    return {}


def top(arguments: argparse.Namespace) -> int:
    """Show the run until it ends, or until q is pressed. Raises ConfigError."""
    watch = Watch(arguments.run)
    watch.read_on()
    console = CleanConsole(highlight=False)
    if arguments.once or not sys.stdout.isatty():
        console.print(watch.frame())
        return 0

    with contextlib.suppress(KeyboardInterrupt), _without_enter(), Live(console=console, auto_refresh=False) as live:
        while True:
            watch.read_on()
            live.update(watch.frame(), refresh=True)
            if watch.ended or _pressed(_REFRESH_S) == "q":
                break
    return 0


@contextlib.contextmanager
def _without_enter() -> Iterator[None]:
    """Within the block keys need no Enter."""
    if not sys.stdin.isatty():
        yield
        return

    settings = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)


def _pressed(wait_s: float) -> str:
    """The key that is pressed within this time; the empty string: none, or there are no keys."""
    came, _, _ = select.select([sys.stdin] if sys.stdin.isatty() else [], [], [], wait_s)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if came else ""
