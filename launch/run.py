"""`fresco run`: from a recipe to the end of a run.

A run goes on from its newest checkpoint when broker, proxy or learner was killed (docs/operations.md). What a
checkpoint holds continues: weights, optimizer, RNG, and the broker's journal with its ledger. The earlier part's folder
is kept beside the run's, numbered. A Python exception is not retried: it would come again.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import yaml

from launch.preflight import Preflight, check, make_run, print_plan
from launch.supervisor import Supervisor
from rl.core.checkpoint_folder import latest, read_meta
from rl.core.config import load_config
from rl.core.run import RunFile


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code of `execute`, 0 after a dry run. Raises ConfigError."""
    started = time.time()
    config = load_config(arguments.recipe, arguments.overrides)
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
    checked = check(config, dry=arguments.dry_run)

    if arguments.dry_run:
        print_plan(checked)
        return 0
    return execute(make_run(checked, started), checked)


def execute(run: RunFile, checked: Preflight) -> int:
    """Run to the end, with at most `learner.max_restarts` restarts. Returns the exit code: 0, 1 or 130."""
    last_step = run.start_step + run.config.steps

    for left in reversed(range(run.config.learner.max_restarts + 1)):
        supervisor = Supervisor(run, checked.plan)
        code = supervisor.execute()
        checkpoint = latest(run.folder / "checkpoints")
        if not supervisor.lost or not left or checkpoint is None or (done := read_meta(checkpoint).step) >= last_step:
            return code

        print(f"going on from {checkpoint.name} ({left} restarts left: learner.max_restarts)", flush=True)
        config = run.config.model_copy(update={"resume": checkpoint, "steps": last_step - done})
        run = make_run(replace(checked, config=config), run.started_at)
    return code
