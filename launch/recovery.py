"""A run goes on from its newest checkpoint when broker, proxy or learner was killed (docs/operations.md).

What a checkpoint holds continues: weights, optimizer, RNG, and the broker's journal with its ledger. The earlier
part's folder is kept beside the run's, numbered. A Python exception is not retried: it would come again.
"""

from __future__ import annotations

from dataclasses import replace

from launch.preflight import Preflight, make_run
from launch.supervisor import Supervisor
from rl.core.checkpoint_folder import latest, read_meta
from rl.core.run import RunFile


def execute(run: RunFile, checked: Preflight) -> int:
    """Run to the end, with at most `learner.max_restarts` restarts. Returns the exit code."""
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
