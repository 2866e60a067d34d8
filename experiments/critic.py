"""PPO with a critic and GAE against GRPO: the same task, model, batches and number of updates.

    python -m experiments.critic plain --seeds 0 1 2 --out experiments/results/critic/plain.json
    bash launch/math_cpu.sh && bash launch/math_cpu_critic.sh
    python -m experiments.critic system runs/math_cpu runs/math_cpu_critic --out experiments/results/critic/system.json

`plain` trains both recipes in one process (`experiments.plain_loop`); `system` reads the folders of finished runs of
the whole system.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from experiments.plain_loop import PlainLoop, model_folder, run
from rl.config import load_config

RECIPES = {"grpo": "experiments/math_cpu.yaml", "ppo_critic": "experiments/math_cpu_critic.yaml"}


def train(recipe: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Held-out accuracy by step, greedy and at temperature 1, and what a step costs."""
    config = load_config(recipe, [f"seed={seed}", *overrides])
    rows = list(run(PlainLoop(config, model_folder(config))))
    due = [row for row in rows if "eval/greedy" in row]
    explained = [row["critic/explained_variance"] for row in rows if "critic/explained_variance" in row]
    return {
        "seed": seed,
        "greedy": {int(row["step"]): round(row["eval/greedy"], 4) for row in due},
        "sampled": {int(row["step"]): round(row["eval/sampled"], 4) for row in due},
        "train_cpu_s_per_step": round(mean(row["cpu_s/train"] for row in rows if "cpu_s/train" in row), 4),
        "explained_variance_last_20": round(mean(explained[-20:]), 3) if explained else None,
    }


def plain(seeds: list[int], overrides: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for seed in seeds:  # both recipes in turn, so that what else the machine does meets both
        for name, recipe in RECIPES.items():
            results.setdefault(name, []).append(one := train(recipe, seed, overrides))
            print(f"{name} seed {seed}: greedy {one['greedy']}", flush=True)
    final = {name: [list(one["greedy"].values())[-1] for one in runs] for name, runs in results.items()}
    return {
        "tasks": load_config(RECIPES["grpo"], overrides).eval.tasks,
        "final_greedy": final,
        "final_greedy_mean": {name: round(mean(values), 4) for name, values in final.items()},
        "runs": results,
    }


def system(folders: list[Path]) -> dict[str, Any]:
    """Held-out accuracy by step, from the folders of finished runs."""
    results = {}
    for folder in folders:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "summary.json").read_text())
        accuracy = {int(row["step"]): round(row["eval/accuracy"], 4) for row in rows if "eval/accuracy" in row}
        kept = ("steps", "alpha", "freshness_violations", "eval", "seconds", "learner_wait_fraction", "ledger")
        results[summary["name"]] = {"accuracy": accuracy} | {key: summary[key] for key in kept}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("plain")
    one.add_argument("--seeds", type=int, nargs="+", default=[0])
    one.add_argument("--set", dest="overrides", nargs="*", default=[], metavar="key=value")
    other = kinds.add_parser("system")
    other.add_argument("folders", type=Path, nargs="+")
    for sub in (one, other):
        sub.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    command = "python -m experiments.critic " + " ".join(sys.argv[1:])
    found = plain(arguments.seeds, arguments.overrides) if arguments.kind == "plain" else system(arguments.folders)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"command": command} | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
