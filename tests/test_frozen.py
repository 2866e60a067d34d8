"""A machine that stands still for longer than `timeouts.hang_s`, with the supervisor and all: nobody has died of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.test_end_to_end_simulated import finish, start, wait_for_step

pytestmark = pytest.mark.slow

HANG_S = 10
DEADLINES = (
    "timeouts.hang_s",
    "learner.batch_deadline_s",
    "weights.deadline_s",
    "rollout.episode_deadline_s",
    "env.step_deadline_s",
)


@pytest.mark.parametrize("first", ["supervisor", "children"])
def test_a_paused_machine_is_nobodys_death(tmp_path: Path, first: str) -> None:
    """Every deadline of a judge is shorter than the pause. first: who wakes before the others."""
    deadlines = [f"{name}={HANG_S}" for name in DEADLINES]
    run = start(tmp_path, "steps=40", *deadlines, "learner.options.step_s=0.1")
    wait_for_step(tmp_path, 3)
    processes = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
    for process in processes:
        process.suspend()
    time.sleep(HANG_S + 2)

    for process in processes if first == "supervisor" else reversed(processes):
        os.kill(process.pid, signal.SIGCONT)
    summary = finish(run, tmp_path)
    logs = tmp_path / "simulated" / "logs"
    assert summary["steps"] == 40 and not list(logs.glob("*.1.log"))
    assert "process-died" not in summary["alarms"]
    assert summary["ledger"]["samples"]["failed"] == 0
