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
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import psutil

from experiments.bench._processes import Watched, watched

LOSSES = "topr,cispo,gspo,reinforce"  # beside the recorded one
UNDO_AT = 9
UNDO_TO = 5
UNDO_STEPS = 12
KEPT = ("learner.checkpoint_every=5", "learner.keep_checkpoints=9")  # so that the one of step 5 is still there


def played(recipe: str, folder: Path, steps: int, kills: int, overrides: list[str]) -> float:
    """One run, whose learner dies `kills` times, evenly spread. Its CPU seconds."""
    name = f"{recipe}_{kills}" if kills else recipe
    words = ["learner.checkpoint_every=10", "learner.keep_checkpoints=100", *overrides]
    with started(recipe, folder, name, steps, words) as watch:
        for place in range(kills):
            watch.until(partial(has_version, folder / name, steps * (place + 1) // (kills + 1)))

            for each in psutil.Process(watch.process.pid).children(recursive=True):
                if "rl.learner.process" in each.cmdline() and str(place) == each.cmdline()[-1]:
                    each.kill()
                    break
        watch.finish()
        return watch.cpu_s


def started(
    recipe: str, folder: Path, name: str, steps: int, overrides: Sequence[str]
) -> AbstractContextManager[Watched]:
    words = [f"runs={folder}", f"name={name}", f"steps={steps}", "tracking.replay=full", "tracking.wandb=disabled"]
    return command("run", recipe, *words, *overrides, output=folder / f"{name}.log")


def command(*words: str, output: Path) -> AbstractContextManager[Watched]:
    output.parent.mkdir(parents=True, exist_ok=True)
    return watched([sys.executable, "-m", "launch.cli", *words], output)


def has_version(folder: Path, version: int) -> bool:
    versions = folder / "versions.jsonl"
    return versions.exists() and f'"n":{version},' in versions.read_text()


def taken_back(recipe: str, folder: Path, overrides: list[str]) -> str:
    """A row of the table: the undo's own words, and those of a replay that begins with that step's checkpoint."""
    name = f"{recipe}_undone"
    with started(recipe, folder, name, UNDO_STEPS, [*KEPT, *overrides]) as watch:
        watch.until(partial(has_version, folder / name, UNDO_AT), every_s=0.05)
        _, undone = done("undo", folder / name, "--to", str(UNDO_TO))
        watch.finish()

    _, replayed = done("replay", folder / name, "--from", str(UNDO_TO))
    return f"| {recipe} | {undone} | {replayed} |"


def done(name: str, run: Path, *words: str) -> tuple[float, str]:
    """CPU seconds of a command and of all below it, and its last line."""
    output = run.with_suffix(f".{name}.log")
    with command(name, str(run), *words, output=output) as watch:
        while watch.running:
            time.sleep(0.05)
        return watch.cpu_s, output.read_text().strip().splitlines()[-1]


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
        run_s = played(recipe, arguments.runs, arguments.steps, arguments.kills, overrides)
        folder = arguments.runs / (f"{recipe}_{arguments.kills}" if arguments.kills else recipe)

        replay_s, said = done("replay", folder)
        lab_s, _ = done("lab", folder, "--losses", LOSSES)
        size = sum(path.stat().st_size for path in (folder / "batches").iterdir())
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        tokens = sum({row["step"]: row["tokens/trained"] for row in rows if "tokens/trained" in row}.values())
        print(
            f"| {folder.name} | {run_s:.0f} | {replay_s:.0f} | {lab_s:.0f} | {size / tokens:.1f} | {said} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
