"""Unmodified agents in complete training runs on real engines: do they train, and is every token exact?

    python -m experiments.agents [openai] [anthropic] [mini_swe] [--runs FOLDER] [key=value ...]

Each is the run of a recipe `experiments/agent_NAME_cpu.yaml`, whose `alarms.exact` compares every token of every batch.
Writes `experiments/results/agents/NAME.json`; status 1 if a run had fewer than ten updates, constant rewards, or
a token that was not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "agents"
AGENTS = ("openai", "anthropic", "mini_swe")
UPDATES = 10


def run(name: str, overrides: Sequence[str], kept: Path | None) -> dict[str, Any]:
    """One complete run, in `kept` or in a folder that is removed. Raises RuntimeError when it does not finish."""
    with tempfile.TemporaryDirectory(prefix="fresco-agents-") as dropped:
        runs = kept or Path(dropped)
        recipe = f"experiments/agent_{name}_cpu.yaml"
        command = [sys.executable, "-m", "launch.cli", "run", str(HERE.parent / recipe), f"runs={runs}", f"name={name}"]
        load = os.getloadavg()[0]
        begin = time.monotonic()
        if code := subprocess.run([*command, *overrides]).returncode:
            raise RuntimeError(f"the run of {recipe} ended with {code}")

        machine = {"cores": os.cpu_count(), "load_average_before": load, "seconds": time.monotonic() - begin}
        shown = " ".join(["fresco run", recipe, *overrides])
        return {"command": shown, **measured(runs / name), "machine": machine}


def measured(folder: Path) -> dict[str, Any]:
    """What the metrics of a run say: updates, rewards, exactness, and what the agents did."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "exact/max" in row]

    deeds = sorted({name for row in steps for name in row if name.startswith("env/")})
    alarms = folder / "alarms.jsonl"

    return {
        "updates": len(steps),
        "rewards": [row["train/reward"] for row in steps],
        "exact": {
            "largest_difference_nats": max((row["exact/max"] for row in steps), default=None),
            "tokens_compared": sum(row["exact/tokens"] for row in steps),
            "tokens_not_compared": sum(row["exact/unknown"] for row in steps),
            "most_versions_in_a_batch": max((row["exact/versions"] for row in steps), default=0),
            "of_each_batch": [row["exact/max"] for row in steps],
        },
        "mean_of_an_episode": {
            name.removeprefix("env/"): sum(row.get(name, 0.0) for row in steps) / len(steps) for name in deeds
        },
        "alarms": [json.loads(line) for line in alarms.read_text().splitlines()] if alarms.exists() else [],
    }


def wrong(result: dict[str, Any]) -> str:
    """What of the promise a result does not show, or the empty string."""
    if result["updates"] < UPDATES:
        return f"{result['updates']} updates were compared, {UPDATES} are wanted"
    if len(set(result["rewards"])) == 1:
        return f"the reward of every update was {result['rewards'][0]}"
    if left := result["exact"]["tokens_not_compared"]:
        return f"{left:.0f} tokens were not compared"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.agents", description=__doc__.splitlines()[0])
    parser.add_argument("chosen", nargs="*", metavar="agent or key=value", help=f"of {', '.join(AGENTS)}; none: all")
    parser.add_argument("--runs", type=Path, help="keep the runs' folders here")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    overrides = [each for each in options.chosen if "=" in each]
    names = [each for each in options.chosen if "=" not in each] or AGENTS
    if strange := set(names) - set(AGENTS):
        parser.error(f"{sorted(strange)[0]!r} is none of {', '.join(AGENTS)}")

    failed = 0
    for name in names:
        result = run(name, overrides, options.runs)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
        why = wrong(result)
        failed += bool(why)
        gap = result["exact"]["largest_difference_nats"]
        print(f"{name}: {result['updates']} updates, largest difference {gap} nats {why and '- ' + why}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
