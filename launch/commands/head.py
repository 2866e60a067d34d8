"""`fresco head --resume RUN`: take the place of the head of a run on several machines, which has died.

Within the lease its agents still wait: broker and proxy come back from the journal, and everything else goes on. Later,
or on another machine, a run of the same name begins with all agents anew. It goes on from the newest checkpoint in the
folder RUN, which is the head's, or that of an agent.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from launch.commands.run import begin_run
from launch.gpus import visible_gpus
from launch.launcher.cluster import ClusterLauncher
from launch.launcher.head_file import Before, read_before
from launch.launcher.node_messages import boot_time
from launch.plan import make_plan
from launch.preflight import hold
from launch.refusing import Refusing
from launch.sittings import newest_checkpoint
from launch.supervisor import Supervisor
from rl.config.schema import Config, ConfigError, validate
from rl.config.tree import apply_override
from rl.store.checkpoint_folder import CheckpointError, verify
from rl.wire.run import RunFile


def resume(arguments: argparse.Namespace) -> int:
    """Returns the exit code of the run. Raises ConfigError."""
    started = time.time()
    folder: Path = arguments.resume.absolute()
    if not (folder / "run.json").exists():
        raise ConfigError(f"--resume {arguments.resume}: no folder of a run (no run.json)")
    run = RunFile.load(folder)
    if not run.config.cluster.count:
        raise ConfigError(f"--resume {arguments.resume}: cluster.nodes=0, one machine has no head; fresco run goes on")

    hold(folder, run.config.name)
    before = read_before(folder)
    if before.may_go_on:
        if arguments.overrides:
            changed = ", ".join(arguments.overrides)
            raise ConfigError(f"{changed}: the agents may still be there, and have their configuration; leave it out")
        if (code := _go_on(run, before)) is not None:
            return code
    elif before.listens is not None:  # its machine was started anew: the leases are over soon
        time.sleep(max(0.0, run.config.cluster.fence_s - boot_time()))

    config = _anew(run, arguments.overrides)
    print(f"no agent of the run is left; it begins anew from {config.resume or 'the start'}", flush=True)
    return begin_run(config, folder / "config.yaml", started)


def _go_on(run: RunFile, before: Before) -> int | None:
    """The exit code of the run; None where no agent has come back."""
    run.socket_folder.mkdir(mode=0o700, exist_ok=True)
    launcher = ClusterLauncher(run, before=before)
    if not launcher.is_back:
        launcher.close()
        return None
    return Supervisor(run, make_plan(run.config, run.device, visible_gpus()), launcher).execute()


def _anew(run: RunFile, overrides: list[str]) -> Config:
    """The run's configuration, which begins with its newest checkpoint. Raises ConfigError."""
    newest = newest_checkpoint(run.folder)
    if newest is not None:
        with Refusing(f"--resume {run.folder}", CheckpointError):
            verify(newest)

    tree = run.config.model_dump(mode="json")
    for item in overrides:
        apply_override(tree, item)
    return validate(tree).model_copy(update={"resume": newest})
