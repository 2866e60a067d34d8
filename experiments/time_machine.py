"""Is a recorded run replayed bit for bit, and what does it cost?

    python -m experiments.time_machine math_cpu alfworld_small agent_tools_cpu --steps 50 [--kills 3] [key=value ...]
    python -m experiments.time_machine math_cpu --undo [key=value ...]

Each recipe is run with `tracking.replay=full`, and its learner is killed as often as asked. Then the run is replayed,
and all its steps are tried under five losses, of which its own is one. A table says what came out, in CPU seconds of
all processes.

With `--undo` a run is taken back from step 9 to step 5 while it goes on. The table says how long that took, and whether
what followed is what a learner computes that begins with the checkpoint of step 5.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

LOSSES = "topr,cispo,gspo,reinforce"  # beside the recorded one
UNDO_AT = 9
UNDO_TO = 5
UNDO_STEPS = 12


def played(recipe: str, folder: Path, steps: int, kills: int, overrides: list[str]) -> None:
    """One run, whose learner dies `kills` times, evenly spread."""
    name = f"{recipe}_{kills}" if kills else recipe
    words = ["learner.checkpoint_every=10", "learner.keep_checkpoints=100", *overrides]
    process = started(recipe, folder, name, steps, words)
    for place in range(kills):
        wait_for(process, folder / name, steps * (place + 1) // (kills + 1))

        for each in psutil.Process(process.pid).children(recursive=True):
            if "rl.learner.process" in each.cmdline() and str(place) == each.cmdline()[-1]:
                each.kill()
                break
    if process.wait():
        raise SystemExit(f"{recipe} failed: {folder / name / 'summary.json'}")


def started(recipe: str, folder: Path, name: str, steps: int, overrides: Sequence[str]) -> subprocess.Popen[bytes]:
    words = [f"runs={folder}", f"name={name}", f"steps={steps}", "tracking.replay=full", "tracking.wandb=disabled"]
    command = [sys.executable, "-m", "launch.cli", "run", recipe, *words, *overrides]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def wait_for(process: subprocess.Popen[bytes], folder: Path, version: int) -> None:
    """Until the run has published this version, or has ended."""
    versions = folder / "versions.jsonl"
    while process.poll() is None and not (versions.exists() and f'"n":{version},' in versions.read_text()):
        time.sleep(0.05)


def taken_back(recipe: str, folder: Path, overrides: list[str]) -> str:
    """A row of the table: the undo's own words, and those of a replay that begins with that step's checkpoint."""
    name = f"{recipe}_undone"
    process = started(recipe, folder, name, UNDO_STEPS, ["learner.checkpoint_every=5", *overrides])
    wait_for(process, folder / name, UNDO_AT)
    _, undone = cpu_s("undo", str(folder / name), "--to", str(UNDO_TO))
    if process.wait():
        raise SystemExit(f"{recipe} failed: {folder / name / 'summary.json'}")

    _, replayed = cpu_s("replay", str(folder / name), "--from", str(UNDO_TO))
    return f"| {recipe} | {undone[-1]} | {replayed[-1]} |"


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
    parser.add_argument("--undo", action="store_true", help="take a live run back, and replay what followed")
    arguments = parser.parse_intermixed_args()
    recipes = [word for word in arguments.recipes if "=" not in word]
    overrides = [word for word in arguments.recipes if "=" in word]

    if arguments.undo:
        for recipe in recipes:
            print(taken_back(recipe, arguments.runs, overrides), flush=True)
        return

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
