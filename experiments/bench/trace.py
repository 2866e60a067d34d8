"""What the trace of a run costs: its share of the run's CPU seconds, and bytes for each trained token.

    python -m experiments.bench trace [RECIPE] [key=value ...] [--out FILE.json]

A run of the recipe (default: experiments/math_cpu.yaml) with `tracking.trace=full`. Every process says in its pulses
how many CPU seconds it has spent on writing the trace. Each 16th call is measured by the clock of its thread, less what
reading that clock takes. What leads to a call (the event that is made) is measured here, once, and counted for each
event in the files. The run's CPU seconds are those of all its processes, engines included, from its first trained step
to its end. So what is imported and compiled at the start does not make the share small. Target: 1 %.

    python -m experiments.bench trace --synthetic FOLDER [--events 1000000]

writes a trace that was never lived, as long as wanted, for whoever must read a long one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.bench._measuring import parser_of, write
from experiments.bench._processes import watched
from experiments.bench._ratios import Idle, provenance
from experiments.bench._synthetic_trace import write_trace
from experiments.compare.job import read_lines
from rl.config.recipes import find_recipe
from rl.observe import trace_events
from rl.observe.trace import FOLDER, NO_TRACE, Source, TraceRecord, read_trace

TARGET = 1.0
"""The target in per cent."""
_CALLS = 100_000


def main(argv: list[str]) -> None:
    options = _options(argv)
    if options.synthetic is not None:
        print(f"{write_trace(options.synthetic, options.events)} events in {options.synthetic / FOLDER}")
        return

    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as folder:
        run = Path(folder) / "traced"
        with Idle() as idle:
            cpu_s = run_traced(options.recipe, options.overrides, run)
        figures = cost(read_trace(run), cpu_s)
        size = sum(path.stat().st_size for path in (run / FOLDER).iterdir())
        figures["bytes_per_trained_token"] = size / figures["trained_tokens"]

    refusal = idle.refusal()
    verdict = f"no verdict: {refusal}" if refusal else "met" if figures["trace_percent"] <= TARGET else "missed"
    for name, value in figures.items():
        print(f"{name}: {value:.2f}")
    print(f"trace_percent at most {TARGET:g}: {verdict}")
    write(options.out, figures | {"verdict": verdict} | provenance(idle))


def run_traced(recipe: Path, overrides: list[str], run: Path) -> float:
    """CPU seconds of all its processes from the first trained step on."""
    command = [sys.executable, "-m", "launch.cli", "run", str(recipe), f"runs={run.parent}", f"name={run.name}"]
    traced = [*command, "tracking.trace=full", "tracking.wandb=disabled", *overrides]

    with watched(traced, run.with_suffix(".log")) as watch:
        watch.until(lambda: any("train/loss" in row for row in read_lines(run / "metrics.jsonl")))
        first_s = watch.cpu_s
        watch.finish()
        return watch.cpu_s - first_s


def cost(events: Iterator[TraceRecord], cpu_s: float) -> dict[str, float]:
    """The cost of a run that took so many CPU seconds."""
    written: dict[Source, float] = {}
    tokens: dict[int, int] = {}
    trained = 0
    count = 0

    for record in events:
        count += 1
        match record.event:
            case trace_events.Pulse(trace_s=trace_s):
                written[record.source] = trace_s
            case trace_events.Delivered(ticket, delivered):
                tokens[ticket] = delivered
            case trace_events.TicketEnded(ticket, end):
                trained += tokens.pop(ticket, 0) if end == "trained" else 0

    trace_s = sum(written.values()) + count * seconds_of_a_call()
    return {
        "trace_percent": 100 * trace_s / cpu_s,
        "run_cpu_s": cpu_s,
        "events": float(count),
        "us_per_event": 1e6 * trace_s / count,
        "trained_tokens": float(trained),
    }


def seconds_of_a_call() -> float:
    """The seconds of a call that writes nothing: a moment is made, and dropped at once."""
    begin = time.process_time()
    for number in range(_CALLS):
        NO_TRACE.add(trace_events.Answered(number, 1, 0, 20, "stop"))
    return (time.process_time() - begin) / _CALLS


def _options(argv: list[str]) -> argparse.Namespace:
    parser = parser_of("trace", __doc__)
    parser.add_argument("recipe", nargs="?", type=find_recipe, default=find_recipe("math_cpu"))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--synthetic", type=Path, metavar="FOLDER", help="write a synthetic trace into this folder")
    parser.add_argument("--events", type=int, default=1_000_000)
    return parser.parse_intermixed_args(argv)
