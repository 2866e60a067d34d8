"""`fresco`: the one command line.

fresco run experiments/math_cpu.yaml learner.lr=1e-4 rollout.alpha=2 [--dry-run]
fresco eval runs/alfworld_cpu/checkpoints/step-100 --env alfworld --split valid_unseen [--greedy | --temperature 1]
fresco check-loss my_module:my_loss clip_high=0.3
fresco plan experiments/math_8gpu.yaml --gpus 8 | fresco plan --run runs/math_8gpu
fresco doctor
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import yaml

from rl.core.config import Config, ConfigError, load_config
from rl.core.plugins import own_packages_first


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 success, 1 failure, 2 bad configuration, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="fresco", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train; any field of the configuration may be overridden with key=value")
    run.add_argument("recipe", type=Path)
    run.add_argument("overrides", nargs="*", metavar="key=value")
    run.add_argument("--dry-run", action="store_true", help="print the configuration and the plan, start nothing")
    loss = commands.add_parser("check-loss", help="try a loss against what every loss must hold, in seconds")
    loss.add_argument("name", help="a registered loss or an importable package.module:Name")
    loss.add_argument("options", nargs="*", metavar="option=value")
    _add_eval(commands.add_parser("eval", help="success on held-out tasks, by task type, through the rollout path"))
    _add_plan(commands.add_parser("plan", help="predict step times of GPU splits, alpha and redundancy; name the best"))
    commands.add_parser("doctor", help="say what this machine has and what is missing")
    arguments, rest = parser.parse_known_args(argv)
    if unknown := [item for item in rest if item.startswith("-") or arguments.command not in ("run", "eval", "plan")]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    own_packages_first()
    if arguments.command == "check-loss":
        from launch.check_loss import run as check_loss

        return check_loss(arguments.name, arguments.options)
    if arguments.command == "doctor":
        from launch.doctor import diagnose

        return diagnose()
    try:
        if arguments.command == "plan":
            from launch.plan_cost import plan

            return plan(arguments, arguments.overrides + rest)
        if arguments.command == "eval":
            return _evaluate(arguments, rest)
        return _run(load_config(arguments.recipe, arguments.overrides + rest), dry=arguments.dry_run)
    except ConfigError as error:
        sys.stdout.flush()  # in a log file, too, the error stands below the configuration
        print(f"fresco: {error}", file=sys.stderr)
        return 2


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, nargs="?", help="not needed with --run")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--run", type=Path, help="a finished run's folder: distributions are fitted to it")
    parser.add_argument("--gpus", type=int, help="in all (default: those of the recipe)")
    parser.add_argument("--train-s", type=float, help="seconds of one training step with the recipe's ranks")
    parser.add_argument("--env-s", metavar="MEAN,SIGMA", help="seconds of one environment step, Gaussian clipped at 0")
    parser.add_argument("--plot", type=Path, default=Path("plan.png"), help="where the plot goes (PNG)")


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", help="a checkpoint, a run's folder (its newest checkpoint), a model folder, a hub name"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--env", help="environment; default: that of the target's own run")
    parser.add_argument("--split", help="held-out tasks to use (valid_seen, valid_unseen)")
    parser.add_argument("--episodes", type=int, help="tasks, one episode each; default: all")
    parser.add_argument("--recipe", type=Path, help="configuration; default: the target's own run's")
    parser.add_argument("--out", type=Path, help="write the table and every episode to this JSON file")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--greedy", action="store_true", help="temperature 0 only; default: greedy and temperature 1")
    how.add_argument("--temperature", type=float, help="this temperature only")


def _evaluate(arguments: argparse.Namespace, rest: list[str]) -> int:
    from launch.evaluate import Request, evaluate

    temperatures = (0.0, 1.0) if arguments.temperature is None else (arguments.temperature,)
    return evaluate(
        Request(
            arguments.target, arguments.env, arguments.split, (0.0,) if arguments.greedy else temperatures,
            arguments.episodes, arguments.recipe, tuple(arguments.overrides + rest), arguments.out,
        )
    )  # fmt: skip


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
