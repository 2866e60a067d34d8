"""`fresco run`: from a recipe to the end of a run.

With `resume`, or by the same command again, it goes on from a checkpoint: weights, optimizer, RNG, and the broker's
journal with its ledger. An earlier folder of the same name is kept beside the run's, numbered.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from launch.cpu.fork_server import begin_as_copies
from launch.dry_run import print_plan
from launch.launcher import make_launcher
from launch.launcher.local import Begin
from launch.machine import machine_of
from launch.preflight import Preflight, check, make_run
from launch.provenance import write_provenance
from launch.sittings import with_checkpoint
from launch.supervisor import Supervisor
from rl.config.schema import Config, ConfigError, load_config
from rl.store.made_once import waited_s
from rl.wire.run import RunFile


def run(arguments: argparse.Namespace) -> int:
    """Returns the exit code of `execute`, 0 after a dry run. Raises ConfigError."""
    started = time.time()
    config = with_checkpoint(load_config(arguments.recipe, arguments.overrides))
    target = machine_of(arguments)
    if arguments.dry_run:
        print_plan(check(config, dry=True, target=target), arguments.recipe, verbose=arguments.verbose)
        return 0
    if target is not None:
        raise ConfigError(f"{target.name}: only with --dry-run; a run takes the GPUs of this machine")

    changes = " ".join(arguments.overrides)
    print(f"{arguments.recipe}{' with ' if changes else ''}{changes}", flush=True)
    return begin_run(config, arguments.recipe, started)


def begin_run(config: Config, recipe: Path, started: float) -> int:
    """A run of this configuration, to its end. Returns the exit code of `execute`. Raises ConfigError."""
    with begin_as_copies(config) as begin:
        checked = check(config, dry=False, begin=begin)
        run = make_run(checked, started + waited_s())  # seconds count without the wait for another's cache
        write_provenance(run.folder, recipe, config, run)
        print(f"configuration: {run.folder / 'config.yaml'}", flush=True)
        return execute(run, checked, begin)


def execute(run: RunFile, checked: Preflight, begin: Begin) -> int:
    """Run to the end. Returns the exit code: 0, 1 or 130."""
    return Supervisor(run, checked.plan, make_launcher(run, begin)).execute()
