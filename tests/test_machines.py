"""A run over machines that are cut off, killed, and join late, and whose head dies: nothing is trained twice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from experiments.machines import Machines, missing
from rl.config.damage import read_lines
from rl.store.batch_files import read_batch_parts

pytestmark = [
    pytest.mark.docs,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"several machines on one box: {missing()}"),
]
ROOT = Path(__file__).parent.parent
LEASE_S = 6.0
STEPS = 400
PATIENCE_S = 200.0
PLACE = "cluster.place={learner: [1, 2], generator: [2, 3], env_server: [4]}"


class Run:
    """`fresco run` on machine 1, with an agent on each of four: they join by hand, or `engine` brings them.

    environment: of the head, beside what is there.
    """

    def __init__(
        self,
        machines: Machines,
        runs: Path,
        recipe: str,
        *overrides: str,
        engine: str = "local",
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.machines = machines
        self.folder = runs / recipe
        self.recipe = recipe
        self.environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | dict(environment or {})

        network = ("network.transport=tcp", f"network.host={machines.address(1)}")
        cluster = (f"cluster.engine={engine}", "cluster.nodes=4", f"cluster.lease_s={LEASE_S:g}", PLACE)
        command = [python, "-m", "launch.cli", "run", recipe, f"runs={runs}", *network, *cluster, *overrides]
        self.log = runs / "head.log"
        with self.log.open("w") as log:
            self.head = machines.begin(1, command, cwd=runs, env=self.environment, stdout=log, stderr=log)

        self.agents: dict[int, subprocess.Popen[str]] = {}
        if engine == "local":
            self.join_all(1, 2, 3, 4)

    def join_all(self, *numbers: int) -> None:
        def found() -> list[str]:
            return re.findall(r"fresco join (\S+)", self.log.read_text())

        wait_for(lambda: bool(found()) or self.head.poll() is not None, self.told)
        assert found(), self.told()
        self.address = found()[0]
        for number in numbers:
            self.join(number)

    def join(self, number: int) -> None:
        command = [sys.executable, "-m", "launch.cli", "join", self.address, "--key", "-", "--machine", str(number)]
        log = (self.log.parent / f"agent{len(self.agents)}.{number}.log").open("w")
        self.agents[number] = agent = self.machines.begin(
            number, command, cwd=self._home(number), env=self.environment, stdin=subprocess.PIPE, stdout=log, stderr=log
        )
        key = self.key()
        pipe: IO[str] | None = agent.stdin
        assert pipe is not None
        pipe.write(key)
        pipe.close()

    def key(self) -> str:
        return (self.folder / "agents.key").read_text()

    def _home(self, number: int) -> str:
        self.machines.run(number, "mkdir -p /tmp/home")
        return "/tmp/home"

    def told(self) -> str:
        logs = [self.log, *self.log.parent.glob("agent*.log"), *self.folder.glob("logs/*.log")]
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in logs)

    def step(self) -> int:
        rows = read_lines(self.folder / "metrics.jsonl", dict[str, Any])  # the last one may be half written
        return max((row["step"] for row in rows if "train/loss" in row), default=0)

    def kill_head(self) -> None:
        """The process alone, which has no time to say anything; its children die with it."""
        (head,) = psutil.Process(self.head.pid).children()
        head.kill()
        self.head.wait(10)

    def begin_head(self, folder: Path, *overrides: str, number: int = 1) -> None:
        command = [sys.executable, "-m", "launch.cli", "head", "--resume", str(folder), *overrides]
        self.log = folder.parent / "head2.log"
        with self.log.open("w") as log:
            self.head = self.machines.begin(number, command, cwd=ROOT, env=self.environment, stdout=log, stderr=log)

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: self.step() >= step or self.head.poll() is not None, self.told)
        assert self.head.poll() is None, self.told()

    def end(self) -> dict[str, Any]:
        assert self.head.wait(PATIENCE_S) == 0, self.told()
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        for counted, all_of in (("samples", "issued"), ("tokens", "generated")):
            ledger = dict(summary["ledger"][counted])
            assert ledger.pop(all_of) == sum(ledger.values()), ledger
        assert not summary["freshness_violations"]
        return summary


def wait_for(condition: Callable[[], bool], told: Callable[[], str]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, told()
        time.sleep(0.05)


def test_machines_are_cut_off_killed_and_join_late_a_head_dies_and_the_last_step_is_reached(tmp_path: Path) -> None:
    shared = {1: [tmp_path], 2: [tmp_path]}
    lease_s = 20.0  # a head is back within it on a busy machine as well
    settings = (f"steps={STEPS}", "learner.options.step_s=0.1", "learner.checkpoint_every=5", "tracking.replay=full")
    with Machines(5, shared=shared) as machines:
        run = Run(machines, tmp_path, "simulated", *settings, f"cluster.lease_s={lease_s:g}")
        run.wait_for_step(5)
        machines.cut(3)
        time.sleep(lease_s / 3)
        machines.heal(3)  # within its lease: nothing has happened
        run.wait_for_step(run.step() + 5)
        assert "is lost" not in run.log.read_text() and run.agents[3].poll() is None

        machines.cut(3)
        wait_for(lambda: run.agents[3].poll() is not None, run.told)
        assert run.agents[3].returncode == 3 and not machines.processes(3)
        wait_for(lambda: "its machine 3 is lost" in run.log.read_text(), run.told)
        machines.heal(3)
        run.wait_for_step(run.step() + 5)
        run.join(3)  # its generator comes back to it
        wait_for(lambda: "it goes back to machine 3" in run.log.read_text(), run.told)

        machines.kill(4)
        wait_for(lambda: "its machine 4 is lost" in run.log.read_text(), run.told)
        run.join(5)
        run.wait_for_step(run.step() + 5)
        run.kill_head()
        run.begin_head(run.folder)
        run.wait_for_step(run.step() + 5)
        machines.kill(2)  # with a rank of the learner
        wait_for(lambda: "learner.1 its machine 2 is lost" in run.log.read_text(), run.told)
        run.wait_for_step(run.step() + 10)
        summary = run.end()

        assert summary["steps"] == STEPS and run.step() == STEPS
        samples = [row.sample_id for part in read_batch_parts(run.folder) if part.rank == 0 for row in part.rows]
        assert len(samples) == len(set(samples)) == STEPS * 16, "nothing is trained twice"
        for number in (1, 3, 5):
            assert run.agents[number].wait(PATIENCE_S) == 0
            assert not machines.processes(number)


MAKES_ONE = """
from experiments.machines import Machines
with Machines(1) as machines:
    print(machines._power[1].pid, machines._tag, machines._folder, flush=True)
    input()
"""


def test_a_machine_dies_with_who_made_it() -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKES_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout is not None
    power, tag, folder = maker.stdout.readline().split()
    machine = psutil.Process(int(power))
    maker.kill()
    maker.wait()
    try:
        assert psutil.wait_procs([machine], timeout=20)[1] == []
    finally:
        subprocess.run(f"ip netns del {tag}1; ip netns del {tag}s; rm -rf {folder}", shell=True, check=False)
