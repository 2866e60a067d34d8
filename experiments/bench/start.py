"""Where the seconds go between the command and the first update, by process and by what they wait for.

    python -m experiments.bench start [RECIPE] [key=value ...] [--rounds 5] [--out FILE.json]

Each round starts `fresco run RECIPE steps=1` as a user would, with everything installed and the model made before. The
round that makes it is not measured. A round ends when the first update is in `metrics.jsonl`. The processes below
the command are read from /proc meanwhile: when each began, and the CPU seconds it has used. Wall
seconds are those of an idle machine only; CPU seconds hold on a busy one too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.bench._measuring import parser_of, write
from experiments.bench._processes import Used, Watched, watched
from experiments.bench._ratios import Idle, machine, provenance

_TARGET_S = 10.0
_LOOK_S = 0.02
_DEADLINE_S = 900.0  # the first round may have to make the model
_MARKS: dict[str, Callable[[Path], bool]] = {
    "configuration checked": lambda run: (run / "run.json").exists(),
    "weights published": lambda run: (run / "versions.jsonl").exists(),
    "first batch": lambda run: any((run / "batches").glob("*")),
    "first update": lambda run: '"train/loss"' in _text(run / "metrics.jsonl"),
}
"""What is seen from outside, in the order in which it comes."""


@dataclass
class Start:
    """One round."""

    marks: dict[str, float] = field(default_factory=dict)
    """Seconds since the command."""
    processes: dict[str, Used] = field(default_factory=dict)

    @property
    def wall_s(self) -> float:
        return self.marks["first update"]

    @property
    def cpu_s(self) -> float:
        return sum(used.cpu_s for used in self.processes.values())


def main(argv: list[str]) -> None:
    options = _options(argv)
    rounds: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as folder:
        one_start(options, Path(folder))  # makes the model, where that has not been done
        with Idle() as idle:
            for number in range(options.rounds):
                rounds.append(one_start(options, Path(folder)))
                print(f"round {number}: {rounds[-1].wall_s:.2f} s, {rounds[-1].cpu_s:.2f} CPU s", flush=True)

    result = _result(rounds)
    _print(result)
    median = statistics.median(result["wall_s"])
    refusal = idle.refusal(options.rounds)
    verdict = f"no verdict: {refusal}" if refusal else "met" if median <= _TARGET_S else "missed"
    print(f"first update after {median:.2f} s; at most {_TARGET_S:g} s: {verdict}")
    print(f"machine: {machine()}")
    write(options.out, result | provenance(idle))


def _options(argv: list[str]) -> argparse.Namespace:
    parser = parser_of("start", __doc__)
    parser.add_argument("recipe", nargs="?", default="math_cpu")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rounds", type=int, default=5)

    return parser.parse_args(argv)


def one_start(options: argparse.Namespace, folder: Path, *, saves: bool = True) -> Start:
    """One start; everything that it began has ended when this returns. saves: its model first."""
    settings = ["steps=1", f"runs={folder}", "name=start", *options.overrides]
    run = folder / "start"
    if run.exists():
        run.rename(folder / f"before-{time.monotonic_ns()}")

    output = folder / "output"
    begun = Start()
    with watched([sys.executable, "-m", "launch.cli", "run", options.recipe, *settings], output) as watch:
        watch.until(lambda: _look(begun, run, watch), _DEADLINE_S, _LOOK_S)
        if not saves:
            watch.kill_learner(0)

    begun.processes = watch.used
    return begun


def _look(begun: Start, run: Path, watch: Watched) -> bool:
    """Note the marks that are there now; whether the last is."""
    for mark, is_there in _MARKS.items():
        if mark not in begun.marks and is_there(run):
            begun.marks[mark] = watch.elapsed_s
    return "first update" in begun.marks


def _result(rounds: list[Start]) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return round(statistics.median(values), 3)

    marks = {mark: median([begun.marks.get(mark, 0.0) for begun in rounds]) for mark in _MARKS}
    names = sorted(set().union(*(begun.processes for begun in rounds)))
    processes = {}
    for name in names:
        used = [begun.processes[name] for begun in rounds if name in begun.processes]
        processes[name] = {
            "began_s": median([each.began_s for each in used]),
            "cpu_s": median([each.cpu_s for each in used]),
        }

    return {
        "wall_s": [round(begun.wall_s, 3) for begun in rounds],
        "cpu_s": [round(begun.cpu_s, 3) for begun in rounds],
        "marks_s": marks,
        "processes": processes,
    }


def _print(result: dict[str, Any]) -> None:
    console = Console(highlight=False)
    table = Table("process", "began, s", "CPU s until the first update", title="medians")
    for name, used in sorted(result["processes"].items(), key=lambda item: item[1]["began_s"]):
        table.add_row(name, f"{used['began_s']:.2f}", f"{used['cpu_s']:.2f}")

    table.add_section()
    table.add_row("all", "", f"{statistics.median(result['cpu_s']):.2f}")
    console.print(table)

    for mark, seconds in result["marks_s"].items():
        console.print(f"{seconds:6.2f} s  {mark}")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
