"""Success on held-out ALFWorld games before and after RL, for several seeds: the README's main command, measured.

    python -m experiments.alfworld_seeds [--seeds 0 1 2] [--episodes 1024] [--runs FOLDER] [key=value ...]

Each seed is one complete run of `experiments/alfworld_small.yaml`, evaluated at temperature 1 on the same games before
and after (`experiments/before_after.py`). A seed whose result is there is not run again. Writes
`experiments/results/alfworld_small/seed-N.json` (every episode) and `README.md` (the table).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from experiments.before_after import ALL, RESULTS, gains, run_seed, table
from launch.recipes import SHIPPED

RECIPE = SHIPPED / "alfworld_small.yaml"
GOAL = 0.15


def reached(result: dict[str, Any]) -> bool:
    """Whether a seed has the goal: at least 15 points more, the interval above 0."""
    mean, low, _ = gains(result)[ALL]
    return mean >= GOAL and low > 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--runs", type=Path, help="where to keep the runs; without it they are removed")
    parser.add_argument("--results", type=Path, default=RESULTS / "alfworld_small")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args(argv)
    arguments.results.mkdir(parents=True, exist_ok=True)
    games = [f"eval.tasks={arguments.episodes}", f"env.options.games.valid_unseen={arguments.episodes}"]

    for seed in arguments.seeds:
        path = arguments.results / f"seed-{seed}.json"
        if not path.exists():
            result = run_seed(RECIPE, seed, [*games, *arguments.overrides], arguments.runs)
            path.write_text(json.dumps(result) + "\n")

    results = [json.loads(path.read_text()) for path in sorted(arguments.results.glob("seed-*.json"))]
    text = table(results, "games")
    heading = "# ALFWorld on 2 CPU cores: held-out games before and after RL, temperature 1"
    (arguments.results / "README.md").write_text(f"{heading}\n\n`python -m experiments.alfworld_seeds`\n\n{text}\n")
    print(text)

    return 0 if all(reached(result) for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
