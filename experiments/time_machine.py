"""Is a recorded run replayed bit for bit, and what does it cost?

    python -m experiments.time_machine math_cpu alfworld_small agent_tools_cpu --steps 50 [--kills 3] [key=value ...]

Each recipe is run with `tracking.replay=full`, and its learner is killed as often as asked. Then the run is replayed,
and all its steps are tried under five losses. A table says what came out, in CPU seconds of all processes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil

LOSSES = "topr,cispo,gspo,dapo,reinforce"


def played(recipe: str, folder: Path, steps: int, kills: int, overrides: list[str]) -> None:
    """One run, whose learner dies `kills` times, evenly spread."""
    name = f"{recipe}_{kills}" if kills else recipe
    words = [f"runs={folder}", f"name={name}", f"steps={steps}", "tracking.replay=full", "tracking.wandb=disabled"]
    words += ["tracking.live=false", "learner.checkpoint_every=10", "learner.keep_checkpoints=100"]
    command = [sys.executable, "-m", "launch.cli", "run", recipe, *words, *overrides]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    versions = folder / name / "versions.jsonl"
    for place in range(kills):
        at = steps * (place + 1) // (kills + 1)
        while process.poll() is None and not (versions.exists() and f'"n":{at},' in versions.read_text()):
            time.sleep(0.05)

        for each in psutil.Process(process.pid).children(recursive=True):
            if "rl.learner.process" in each.cmdline() and str(place) == each.cmdline()[-1]:
                each.kill()
                break
    if process.wait():
        raise SystemExit(f"{recipe} failed: {folder / name / 'summary.json'}")


def cpu_s(*command: str) -> tuple[float, list[str]]:
    """CPU seconds of a command and of its children, and what it says."""
    before = _children_s()
    said = subprocess.run([sys.executable, "-m", "launch.cli", *command], capture_output=True, text=True)
    return _children_s() - before, (said.stdout + said.stderr).strip().splitlines()


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="recipes, and key=value for all of them")
    parser.add_argument("--runs", type=Path, default=Path("runs/time_machine"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--kills", type=int, default=0)
    arguments = parser.parse_args()
    recipes = [word for word in arguments.recipes if "=" not in word]
    overrides = [word for word in arguments.recipes if "=" in word]

    print("| run | CPU s of the run | of the replay | of five losses | bytes a token | what the replay says |")
    print("|---|---|---|---|---|---|")
    for recipe in recipes:
        begin = _children_s()
        played(recipe, arguments.runs, arguments.steps, arguments.kills, overrides)
        run_s = _children_s() - begin
        folder = arguments.runs / (f"{recipe}_{arguments.kills}" if arguments.kills else recipe)

        replay_s, said = cpu_s("replay", str(folder))
        lab_s, _ = cpu_s("lab", str(folder), "--losses", LOSSES)
        size = sum(path.stat().st_size for path in (folder / "batches").iterdir())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        tokens = sum({row["step"]: row["tokens/trained"] for row in rows if "tokens/trained" in row}.values())
        print(
            f"| {folder.name} | {run_s:.0f} | {replay_s:.0f} | {lab_s:.0f} | {size / tokens:.1f} | {said[-1]} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
