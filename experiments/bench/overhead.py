"""What broker, proxy, environment server and supervisor cost beside an engine: shares of one core.

    python -m experiments.bench overhead [--seconds 30] [--rate 2000] [--tokens 100] [--out FILE.json]

Measured is the complete system of real processes. A simulated engine gives `--rate` tokens a second in answers of
`--tokens`. The learner is simulated too, and the environment has no work of its own. CPU seconds are the kernel's, of
each process between two moments, after a warm-up; the rate is what the environment's episodes really got meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.bench._measuring import parser_of, write
from experiments.bench._processes import Watched, watched
from experiments.bench._ratios import machine
from experiments.compare.job import read_lines

TARGET = 0.05
_RECIPE = Path(__file__).parent.parent / "simulated.yaml"
_MEASURED = {
    "broker": "rollout.broker.process 0",
    "proxy": "rollout.proxy.process 0",
    "environment server": "envs.server 0",
    "supervisor": "the command",
}
_AT_ONCE = 32
_BETWEEN = 0.95  # share of an episode in which it decodes: the next one has to begin
_PER_STEP = 64
_START_S = 60.0
_ENOUGH_RATE = 0.9


@dataclass(frozen=True)
class Reading:
    """What was used since the start, at one moment."""

    time_s: float
    cpu_s: dict[str, float]
    samples: int


def main(argv: list[str]) -> None:
    options = _options(argv)
    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as name:
        folder = Path(name)
        with watched(_command(options, folder), folder / "output") as watch:
            watch.until(lambda: len(_steps(folder)) >= 1, _START_S)
            watch.until(lambda: len(_steps(folder)) >= 2)
            first = _read(watch, folder)
            watch.until(lambda: watch.elapsed_s - first.time_s >= options.seconds)
            begun = len(_steps(folder))
            watch.until(lambda: len(_steps(folder)) > begun)  # both readings are of the end of a step
            last = _read(watch, folder)

    result = _result(first, last, options)
    _print(result)
    write(options.out, result)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = parser_of("overhead", __doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="that are measured")
    parser.add_argument("--rate", type=float, default=2000.0, help="tokens a second")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer")
    parser.add_argument("overrides", nargs="*", metavar="key=value")

    return parser.parse_args(argv)


def _command(options: argparse.Namespace, folder: Path) -> list[str]:
    settings = {
        "runs": folder,
        "name": "overhead",
        "steps": 1_000_000,
        "sampling.max_tokens": options.tokens,
        "rollout.groups_per_batch": _PER_STEP // 8,
        "rollout.group_size": 8,
        "generator.count": 1,
        "generator.max_num_seqs": _AT_ONCE,
        "generator.options.length_mean": options.tokens,
        "generator.options.length_sigma": 0,
        "generator.options.decode_base_s": _BETWEEN * _AT_ONCE / options.rate,
        "generator.options.decode_per_seq_s": 0,
        "env.servers": 1,
        "env.episodes_per_server": 2 * _AT_ONCE,
        "env.max_turns": 1,
        "env.options.turns": 1,
        "learner.ranks": 1,
        "eval.every": 0,
    }

    overrides = [*(f"{key}={value}" for key, value in settings.items()), *options.overrides]
    return [sys.executable, "-m", "launch.cli", "run", str(_RECIPE), *overrides]


def _steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "overhead" / "metrics.jsonl") if "train/loss" in line]


def _read(watch: Watched, folder: Path) -> Reading:
    cpu_s = {name: watch.used[process].cpu_s for name, process in _MEASURED.items()}
    return Reading(watch.elapsed_s, cpu_s, len(_steps(folder)) * _PER_STEP)


def _result(first: Reading, last: Reading, options: argparse.Namespace) -> dict[str, Any]:
    seconds = last.time_s - first.time_s
    shares = {name: (last.cpu_s[name] - first.cpu_s[name]) / seconds for name in _MEASURED}
    samples = last.samples - first.samples

    return {
        "machine": machine(),
        "seconds": round(seconds, 1),
        "tokens_per_s": samples * options.tokens / seconds,
        "asked_tokens_per_s": options.rate,
        "share_of_a_core": shares,
        "ms_per_answer": {name: 1e3 * share * seconds / max(1, samples) for name, share in shares.items()},
        "all": sum(shares.values()),
        "target": TARGET,
    }


def _print(result: dict[str, Any]) -> None:
    table = Table("process", "share of a core", "CPU ms an answer")
    for name, share in result["share_of_a_core"].items():
        table.add_row(name, f"{share:.2%}", f"{result['ms_per_answer'][name]:.2f}")
    Console(highlight=False).print(table)

    rate = result["tokens_per_s"]
    verdict = "met" if result["all"] <= TARGET else "missed"
    if rate < _ENOUGH_RATE * result["asked_tokens_per_s"]:
        verdict = "no verdict: the machine did not give the engine its rate"
    print(f"{rate:.0f} tokens a second; together {result['all']:.2%} of a core, at most {TARGET:.0%}: {verdict}")
    print(f"machine: {result['machine']}")
