"""Success on held-out ALFWorld games before and after RL, for several seeds: the README's main command, measured.

    python -m experiments.alfworld_seeds [--seeds 0 1 2] [--episodes 1024] [--runs FOLDER] [key=value ...]

Each seed is one complete run of `experiments/alfworld_cpu.yaml` (its own games' order, demonstrations, weights and
sampling), evaluated at temperature 1 on the same games before and after. A seed whose result is there is not run
again. Writes `experiments/results/alfworld/seed-N.json` (every episode) and `README.md` (the table). The difference is
paired by game; its interval is a bootstrap over games.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from envs.registry import make_family
from launch.intervals import paired_bootstrap, wilson
from rl.core.run import RunFile

HERE = Path(__file__).parent
RECIPE = HERE / "alfworld_cpu.yaml"
RESULTS = HERE / "results" / "alfworld"
GOAL = 0.15


def run_seed(seed: int, episodes: int, overrides: Sequence[str], kept: Path | None) -> dict[str, Any]:
    """One complete run, in `kept` or in a folder that is removed. Raises RuntimeError when it does not finish."""
    with tempfile.TemporaryDirectory(prefix="alfworld-seed-") as dropped:
        runs = kept or Path(dropped)
        name = f"seed-{seed}"
        command = [
            sys.executable,
            "-m",
            "launch.cli",
            "run",
            str(RECIPE),
            f"seed={seed}",
            f"model.warm_start.seed={seed}",
            f"eval.tasks={episodes}",
            f"env.options.games.valid_unseen={episodes}",
            f"runs={runs}",
            f"name={name}",
            *overrides,
        ]

        if code := subprocess.run(command).returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {code}")
        return read_run(runs / name, seed)


def read_run(folder: Path, seed: int) -> dict[str, Any]:
    """Task types and successes before and after, in the order of the games, and what the run took."""
    run = RunFile.load(folder)
    summary = json.loads((folder / "summary.json").read_text())
    before, after = successes(folder / "evals.jsonl")
    tasks = sorted(before.keys() & after.keys())  # a game that failed in either has no pair
    family = make_family(run.config)

    return {
        "seed": seed,
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "freshness_violations": summary["freshness_violations"],
        "types": [str(family.task("eval", task).task_type) for task in tasks],
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


def table(results: Sequence[dict[str, Any]]) -> str:
    """Markdown: one line per seed and task type."""
    lines = [
        "| seed | tasks | games | warm start | after RL | difference (95 % interval) |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        for label in ["all", *sorted(set(result["types"]))]:
            chosen = [index for index, kind in enumerate(result["types"]) if label in ("all", kind)]
            before, after = ([result[when][index] for index in chosen] for when in ("before", "after"))
            mean, low, high = paired_bootstrap(before, after)

            lines.append(
                f"| {result['seed']} | {label} | {len(chosen)} | {_share(before)} | {_share(after)} "
                f"| {100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) |"
            )

    return "\n".join(lines)


def reached(result: dict[str, Any]) -> bool:
    """Whether a seed has the goal: at least 15 points more, the interval above 0."""
    mean, low, _ = paired_bootstrap(result["before"], result["after"])
    return mean >= GOAL and low > 0


def _share(values: Sequence[float]) -> str:
    low, high = wilson(sum(values), len(values))
    return f"{100 * sum(values) / len(values):.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--runs", type=Path, help="where to keep the runs; without it they are removed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)
    arguments.results.mkdir(parents=True, exist_ok=True)

    for seed in arguments.seeds:
        path = arguments.results / f"seed-{seed}.json"
        if not path.exists():
            result = run_seed(seed, arguments.episodes, arguments.overrides, arguments.runs)
            path.write_text(json.dumps(result) + "\n")

    results = [json.loads(path.read_text()) for path in sorted(arguments.results.glob("seed-*.json"))]
    text = table(results)
    heading = "# ALFWorld on 2 CPU cores: held-out games before and after RL, temperature 1"
    (arguments.results / "README.md").write_text(f"{heading}\n\n`python -m experiments.alfworld_seeds`\n\n{text}\n")
    print(text)

    return 0 if all(reached(result) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
