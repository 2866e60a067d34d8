"""PPO with a critic and GAE against GRPO: the same task, model, batches and number of updates.

    python -m experiments.critic plain --seeds 0 1 2 --out experiments/results/critic/plain.json
    bash launch/math_cpu.sh && bash launch/math_cpu_critic.sh
    python -m experiments.critic system runs/math_cpu runs/math_cpu_critic --out experiments/results/critic/system.json

`plain` trains both recipes in one process (`experiments.plain_loop`) and goes on where an earlier call stopped;
`system` reads the folders of finished runs of the whole system.
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
from rl.config.schema import load_config

RECIPES = {"grpo": "experiments/math_cpu.yaml", "ppo_critic": "experiments/math_cpu_critic.yaml"}


def train(recipe: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Held-out accuracy by step, greedy and at temperature 1, and what a step costs."""
    config = load_config(recipe, [f"seed={seed}", *overrides])
    return digest(seed, list(run(PlainLoop(config, model_folder(config)))))


def digest(seed: int, rows: list[dict[str, float]]) -> dict[str, Any]:
    """What is kept of one run's rows of metrics."""
    due = [row for row in rows if "eval/greedy" in row]
    explained = [row["critic/explained_variance"] for row in rows if "critic/explained_variance" in row]

    return {
        "seed": seed,
        "greedy": {str(int(row["step"])): round(row["eval/greedy"], 4) for row in due},
        "sampled": {str(int(row["step"])): round(row["eval/sampled"], 4) for row in due},
        "train_cpu_s_per_step": round(mean(row["cpu_s/train"] for row in rows if "cpu_s/train" in row), 4),
        "explained_variance_last_20": round(mean(explained[-20:]), 3) if explained else None,
    }


def plain(seeds: list[int], overrides: list[str], out: Path, command: str) -> None:
    """Train what `out` does not hold yet, and write it after each run."""
    runs: dict[str, list[dict[str, Any]]] = json.loads(out.read_text())["runs"] if out.exists() else {}
    for seed in seeds:  # both recipes in turn, so that what else the machine does meets both
        for name, recipe in RECIPES.items():
            if seed not in [one["seed"] for one in runs.setdefault(name, [])]:
                runs[name].append(train(recipe, seed, overrides))
                print(f"{name} seed {seed}: greedy {runs[name][-1]['greedy']}", flush=True)
                write(out, command, summarise(runs, load_config(RECIPES["grpo"], overrides).eval.tasks))


def summarise(runs: dict[str, list[dict[str, Any]]], tasks: int) -> dict[str, Any]:
    """The runs, with the last greedy accuracy of each and its mean over seeds."""
    final = {name: [list(one["greedy"].values())[-1] for one in done] for name, done in runs.items()}
    means = {name: round(mean(values), 4) for name, values in final.items() if values}
    return {"tasks": tasks, "final_greedy": final, "final_greedy_mean": means, "runs": runs}


def write(out: Path, command: str, found: dict[str, Any]) -> None:
    """The result, beside the command that made it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"command": command} | found, indent=2) + "\n")


def system(folders: list[Path]) -> dict[str, Any]:
    """Held-out accuracy by step, from the folders of finished runs."""
    results = {}
    for folder in folders:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "summary.json").read_text())
        accuracy = {int(row["step"]): round(row["eval/accuracy"], 4) for row in rows if "eval/accuracy" in row}
        kept = ("steps", "alpha", "staleness", "freshness_violations", "eval")
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

    if arguments.kind == "plain":
        plain(arguments.seeds, arguments.overrides, arguments.out, command)
    else:
        write(arguments.out, command, system(arguments.folders))


if __name__ == "__main__":
    main()
