"""The head of a run over several machines dies, and another takes its place: within the lease, and later."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.machines import Machines, missing
from tests.test_machines import LEASE_S, ROOT, Run, wait_for

pytestmark = [pytest.mark.docs, pytest.mark.skipif(bool(missing()), reason=f"several machines on one box: {missing()}")]
SIMULATED = ("simulated", "steps=80", "learner.options.step_s=0.1", "learner.checkpoint_every=5")


def kill_head(run: Run) -> None:
    """The process alone, which has no time to say anything; its children die with it."""
    (head,) = psutil.Process(run.head.pid).children()
    head.kill()
    run.head.wait(10)


def begin_head(run: Run, folder: Path, *overrides: str, number: int = 1) -> None:
    command = [sys.executable, "-m", "launch.cli", "head", "--resume", str(folder), *overrides]
    run.log = folder.parent / "head2.log"
    with run.log.open("w") as log:
        run.head = run.machines.begin(number, command, cwd=ROOT, env=run.environment, stdout=log, stderr=log)


def steps_trained(folder: Path) -> list[int]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if "train/loss" in row]


def test_a_head_that_is_back_within_the_lease_finds_its_agents_waiting(tmp_path: Path) -> None:
    with Machines(4, shared={1: [tmp_path], 2: [tmp_path]}) as machines:
        run = Run(machines, tmp_path, *SIMULATED)
        run.wait_for_step(12)
        kill_head(run)
        time.sleep(LEASE_S / 3)
        begin_head(run, run.folder)
        begun = time.monotonic()
        wait_for(lambda: "machine 4 is back" in run.log.read_text(), run.told)
        assert time.monotonic() - begun < LEASE_S
        run.wait_for_step(30)
        summary = run.end()

        assert summary["steps"] == 80 and steps_trained(run.folder) == list(range(1, 81))
        logs = {path.name for path in (run.folder / "logs").iterdir()}
        assert {"broker.0.1.log", "proxy.0.1.log"} <= logs
        again = {name for name in logs if not name.endswith(".0.log")} - {"broker.0.1.log", "proxy.0.1.log"}
        assert not again, "what stood on the machines went on"
        for number, agent in run.agents.items():
            assert agent.wait(60) == 0 and not machines.processes(number)
