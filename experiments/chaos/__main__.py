"""Faults from a seed over all processes of a run, and what must hold afterwards.

    python -m experiments.chaos experiments/simulated.yaml --seed 1 --faults 100 generator.count=20 steps=300
    python -m experiments.chaos math_cpu --seed 1 --faults 20 --compare --out result.json eval.tasks=1024

Exits with 1 if anything does not hold; what the run wrote is then kept. `--compare` plays the same run without faults
first, and prints what each kind of fault cost on each role. `--compare free.json` takes it from there instead, where an
earlier call with `--faults 0 --out free.json` has left it. `disk` mounts a small file system and needs root.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import get_args

import psutil

from experiments.chaos.play import play
from experiments.chaos.report import played_before, report, table
from experiments.chaos.schedule import KINDS, Kind, make_schedule, roles_of
from rl.config.recipes import find_recipe
from rl.config.schema import load_config


def _kinds(text: str) -> list[Kind]:
    kinds = [kind for kind in get_args(Kind) if kind in text.split(",")]
    if len(kinds) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(KINDS)}")
    return kinds


def main() -> int:
    kinds_help = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=find_recipe)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--kinds", type=_kinds, default="kill,stop,pause", help=f"separated by commas; {kinds_help}")
    parser.add_argument("--stuck-s", type=float, default=120.0, help="without a new step for so long, the run is stuck")
    parser.add_argument(
        "--compare", nargs="?", const=True, help="with the same run without faults, or with this result"
    )
    parser.add_argument("--out", type=Path)

    arguments = parser.parse_intermixed_args()

    overrides = [f"seed={arguments.seed}", "max_restarts=100000", *arguments.overrides]
    config = load_config(arguments.recipe, overrides)
    schedule = make_schedule(arguments.seed, arguments.faults, config.steps, arguments.kinds, roles_of(config))

    free = None
    if arguments.compare is True:
        free = play(arguments.recipe, overrides, [], arguments.stuck_s)
    elif arguments.compare:
        free = played_before(Path(arguments.compare))

    played = play(arguments.recipe, overrides, schedule, arguments.stuck_s)

    found = report(played, free, config.eval.tasks)
    found["command"] = f"python -m experiments.chaos {shlex.join(sys.argv[1:])}"
    found["machine"] = f"{psutil.cpu_count()} cores, {platform.machine()}"

    print(table(found.get("costs", {})))
    print(json.dumps({key: value for key, value in found.items() if key != "costs"}, indent=1))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
