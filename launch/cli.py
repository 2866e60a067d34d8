"""`fresco`: the one command line.

fresco run experiments/math_cpu.yaml learner.lr=1e-4 rollout.alpha=2 [--dry-run]
fresco check-loss my_module:my_loss clip_high=0.3
fresco doctor
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import yaml

from rl.config import Config, ConfigError, load_config


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 success, 1 failure, 2 bad configuration, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="fresco", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train; any field of the configuration may be overridden with key=value")
    run.add_argument("recipe", type=Path)
    run.add_argument("overrides", nargs="*", metavar="key=value")
    run.add_argument("--dry-run", action="store_true", help="print the configuration and the plan, start nothing")
    loss = commands.add_parser("check-loss", help="try a loss against what every loss must hold, in seconds")
    loss.add_argument("name", help="a registered loss or an importable module:function")
    loss.add_argument("options", nargs="*", metavar="option=value")
    commands.add_parser("doctor", help="say what this machine has and what is missing")
    arguments, rest = parser.parse_known_args(argv)
    if unknown := [item for item in rest if item.startswith("-") or arguments.command != "run"]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    sys.path.insert(0, os.getcwd())  # a plug-in may stand in the folder of its user
    if arguments.command == "check-loss":
        from launch.check_loss import run as check_loss

        return check_loss(arguments.name, arguments.options)
    if arguments.command == "doctor":
        from launch.doctor import diagnose

        return diagnose()
    try:
        return _run(load_config(arguments.recipe, arguments.overrides + rest), dry=arguments.dry_run)
    except ConfigError as error:
        print(f"fresco: {error}", file=sys.stderr)
        return 2


def _run(config: Config, *, dry: bool) -> int:
    from launch.plan import make_plan
    from launch.preflight import check, make_run, print_plan, resolve_device
    from launch.recovery import execute

    started = time.time()
    device = resolve_device(config)
    plan = make_plan(config, device)
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
    prepared, train_tasks, eval_tasks, unchecked = check(config, device, dry=dry)
    if dry:
        print_plan(config, device, plan, unchecked)
        return 0
    run = make_run(config, device, prepared, train_tasks, eval_tasks, started)
    return execute(run, plan, prepared)


if __name__ == "__main__":
    sys.exit(main())
