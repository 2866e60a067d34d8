"""`cluster.engine=slurm` and `ray`, with a real slurmctld and real raylets on machines of one box.

SLURM: $FRESCO_TEST_SLURM names a folder with the unpacked packages (tests/slurm.sh). Ray: $FRESCO_TEST_RAY names a
Python that has both Ray and Fresco's packages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.machines import Machines, missing
from tests.test_machines import wait_for

SLURM = os.environ.get("FRESCO_TEST_SLURM", "")
RAY = os.environ.get("FRESCO_TEST_RAY", "")
ROOT = Path(__file__).parent.parent
COUNT = 2
PATIENCE_S = 120.0
SMALL = ("steps=3", "generator.count=1", "learner.ranks=1", "env.servers=1", "eval.tasks=0")

pytestmark = [pytest.mark.docs, pytest.mark.skipif(bool(missing()), reason=f"several machines on one box: {missing()}")]


def run(machines: Machines, python: str, engine: str, runs: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The summary of a run, after which nothing of ours is left on any machine."""
    network = ("network.transport=tcp", f"network.host={machines.address(1)}")
    cluster = (f"cluster.engine={engine}", f"cluster.nodes={COUNT}")
    command = [python, "-m", "launch.cli", "run", "simulated", f"runs={runs}", *network, *cluster, *SMALL]
    with (runs / "head.log").open("w") as log:
        head = machines.begin(1, command, cwd=runs, env=environment, stdout=log, stderr=log)
        assert head.wait(PATIENCE_S) == 0, (runs / "head.log").read_text()

    left = [line for number in range(1, COUNT + 1) for line in machines.processes(number) if "launch." in line]
    assert not left
    summary: dict[str, Any] = json.loads((runs / "simulated" / "summary.json").read_text())
    return summary


@pytest.mark.skipif(not SLURM, reason="no SLURM: FRESCO_TEST_SLURM names the folder of its unpacked packages")
def test_slurm_starts_an_agent_on_each_machine(tmp_path: Path) -> None:
    (tmp_path / "munge.key").write_bytes(os.urandom(1024))
    shared = {number: [tmp_path, Path(SLURM)] for number in range(1, COUNT + 1)}
    with Machines(COUNT, shared=shared) as machines:
        for number in range(1, COUNT + 1):
            boot = ["bash", str(ROOT / "tests" / "slurm.sh"), str(tmp_path), SLURM, str(number), str(COUNT)]
            booted = machines.begin(number, boot, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert booted.wait(PATIENCE_S) == 0, booted.communicate()[0]

        def idle() -> str:
            return machines.run(1, "sinfo -h -o '%D %t' || true").strip()

        wait_for(lambda: idle() == f"{COUNT} idle", idle)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        assert run(machines, sys.executable, "slurm", tmp_path, environment)["steps"] == 3
        assert len(list(tmp_path.glob("fresco-agent-*.log"))) == COUNT
        wait_for(lambda: not machines.run(1, "squeue -h").strip(), lambda: "jobs are left")


@pytest.mark.skipif(not RAY, reason="no Ray: FRESCO_TEST_RAY names a Python that has it, and our packages")
def test_ray_starts_an_agent_on_each_machine(tmp_path: Path) -> None:
    home = Path(RAY).parents[1]
    seen = [tmp_path, home] if home.is_relative_to("/tmp") else [tmp_path]
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    environment = os.environ | quiet | {"PATH": f"{home}/bin:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)  # the code comes with the job
    with Machines(COUNT, shared={number: seen for number in range(1, COUNT + 1)}) as machines:
        for number in range(1, COUNT + 1):
            first = ["--head", "--port=6379", "--include-dashboard=false"]
            where = first if number == 1 else [f"--address={machines.address(1)}:6379"]
            start = [f"{home}/bin/ray", "start", *where, f"--node-ip-address={machines.address(number)}"]
            sizes = ["--num-cpus=4", "--object-store-memory=80000000", "--disable-usage-stats"]
            options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            started = machines.begin(number, [*start, *sizes], cwd="/tmp", env=environment, **options)
            said = started.communicate(timeout=PATIENCE_S)[0]
            assert started.returncode == 0, said

        driver = environment | {"PYTHONPATH": str(ROOT)}
        assert run(machines, RAY, "ray", tmp_path, driver)["steps"] == 3
        assert "agent ended" not in (tmp_path / "head.log").read_text()
