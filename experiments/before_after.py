"""Success on held-out tasks before and after a run of a recipe, paired by task.

    python -m experiments.before_after mixture_cpu [--seeds 0] [--out FOLDER] [--runs FOLDER] [key=value ...]

Each seed is one complete run (its own order of tasks, demonstrations, weights and sampling), its warm start included,
evaluated on the same held-out tasks before and after. A seed whose result is there is not run again. Writes
`seed-N.json` (every episode, and what the run took) and `README.md` (the table) to `experiments/results/<recipe>/`. The
difference is paired by task; its interval is a 95 % bootstrap over tasks. The exit code is 0 if the interval of every
kind of task lies above 0.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from envs.registry import make_family
from launch.intervals import paired_bootstrap, wilson
from launch.recipes import SHIPPED
from rl.wire.run import RunFile

ALL = "all"
RESULTS = Path(__file__).parent / "results"


def run_seed(recipe: Path, seed: int, overrides: Sequence[str], kept: Path | None) -> dict[str, Any]:
    """One complete run, in `kept` or in a folder that is removed. Raises RuntimeError when it does not finish."""
    with tempfile.TemporaryDirectory(prefix=f"{recipe.stem}-") as dropped:
        runs = kept or Path(dropped)
        name = f"seed-{seed}"
        seeds = [f"seed={seed}", f"model.warm_start.seed={seed}"]
        took = timed_run(recipe, [*seeds, f"runs={runs}", f"name={name}", *overrides])
        return read_run(runs / name, seed) | took


def timed_run(recipe: Path, overrides: Sequence[str]) -> dict[str, float]:
    """One run: its seconds by the clock and of all CPUs, and the machine's load over the last 5 minutes.

    Raises RuntimeError when it does not finish.
    """
    command = [sys.executable, "-m", "launch.cli", "run", str(recipe), *overrides]
    began = time.monotonic()
    spent_s = _cpu_s()
    if code := subprocess.run(command).returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {code}")

    return {
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(_cpu_s() - spent_s, 1),
        "load": os.getloadavg()[1],
    }


def read_run(folder: Path, seed: int) -> dict[str, Any]:
    """Task types and successes before and after, in the order of the tasks, and what the run took."""
    run = RunFile.load(folder)
    summary = json.loads((folder / "summary.json").read_text())
    before, after = successes(folder / "evals.jsonl")
    tasks = sorted(before.keys() & after.keys())  # a task that failed in either has no pair
    family = make_family(run.config)

    return {
        "seed": seed,
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "freshness_violations": summary["freshness_violations"],
        "types": [str(getattr(family.task("eval", task), "task_type", ALL)) for task in tasks],
        "before": [before[task] for task in tasks],
        "after": [after[task] for task in tasks],
    }


def successes(evals: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Success by task of the first and of the last evaluated version."""
    rows = [msgspec.json.decode(line) for line in evals.read_bytes().splitlines()]
    versions = [row["version"] for row in rows]
    first, last = (
        {row["task_index"]: row["success"] for row in rows if row["version"] == version}
        for version in (min(versions), max(versions))
    )
    return first, last


def gains(result: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """(mean, low, high) of the paired gain, of all tasks and of each type."""
    return {label: paired_bootstrap(*_pairs(result, label)) for label in [ALL, *sorted({*result["types"]} - {ALL})]}


def table(results: Sequence[dict[str, Any]], counted: str = "held-out tasks") -> str:
    """Markdown: one line per seed and task type."""
    lines = [
        f"| seed | tasks | {counted} | warm start | after RL | difference (95 % interval) |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        for label, (mean, low, high) in gains(result).items():
            before, after = _pairs(result, label)
            lines.append(
                f"| {result['seed']} | {label} | {len(before)} | {_share(before)} | {_share(after)} "
                f"| {100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) |"
            )

    return "\n".join(lines)


def cost(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: what each run took, its warm start included where it was not made before."""
    lines = ["| seed | steps | minutes | CPU minutes | load of the machine |", "|---|---|---|---|---|"]
    for each in (result for result in results if "wall_s" in result):  # older ones were not timed
        times = f"{each['wall_s'] / 60:.1f} | {each['cpu_s'] / 60:.1f}"
        lines.append(f"| {each['seed']} | {each['steps']} | {times} | {each['load']:.1f} |")
    return "\n".join(lines)


def page(recipe: str, results: Sequence[dict[str, Any]]) -> str:
    heading = f"# {recipe}: held-out tasks before and after RL"
    made = f"`python -m experiments.before_after {recipe}`"
    return f"{heading}\n\n{made}\n\n{table(results)}\n\n{cost(results)}\n"


def _pairs(result: dict[str, Any], label: str) -> tuple[list[float], list[float]]:
    chosen = [index for index, kind in enumerate(result["types"]) if label in (ALL, kind)]
    return [result["before"][index] for index in chosen], [result["after"][index] for index in chosen]


def _share(values: Sequence[float]) -> str:
    low, high = wilson(sum(values), len(values))
    return f"{100 * sum(values) / len(values):.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _cpu_s() -> float:
    """CPU seconds of all processes that have ended below this one and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="one that comes with Fresco, such as mixture_cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", type=Path, help="where to keep the runs; without it they are removed")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)
    out = arguments.out or RESULTS / arguments.recipe
    out.mkdir(parents=True, exist_ok=True)

    for seed in arguments.seeds:
        path = out / f"seed-{seed}.json"
        if not path.exists():
            result = run_seed(SHIPPED / f"{arguments.recipe}.yaml", seed, arguments.overrides, arguments.runs)
            path.write_text(json.dumps(result) + "\n")

    results = [json.loads(path.read_text()) for path in sorted(out.glob("seed-*.json"))]
    (out / "README.md").write_text(page(arguments.recipe, results))
    print(page(arguments.recipe, results))
    return 0 if all(low > 0 for result in results for _, low, _ in gains(result).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
