"""`cluster.engine=ssh`, `slurm` and `ray`, with a real sshd, slurmctld and raylets on machines of one box.

SLURM: $FRESCO_TEST_SLURM names a folder with the unpacked packages (tests/slurm.sh). Ray: $FRESCO_TEST_RAY names a
Python that has both Ray and Fresco's packages. `tests/engines.sh` makes both.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from experiments.machines import Machines, missing
from tests.test_machines import wait_for

SLURM = os.environ.get("FRESCO_TEST_SLURM", "")
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin") if shutil.which("ssh") else None
RAY = os.environ.get("FRESCO_TEST_RAY", "")
RAY_HOME = Path(RAY).parent.parent
NO_SLURM = "no SLURM: FRESCO_TEST_SLURM names the folder of its unpacked packages (tests/engines.sh)"
NO_RAY = "no Ray: FRESCO_TEST_RAY names a Python that has it, and our packages (tests/engines.sh)"
OURS = re.compile(r"-m (launch|rl|rollout|envs)\.")
ROOT = Path(__file__).parent.parent
COUNT = 2
NOT_SENT = [".git", ".venv*", "build", "docs", "runs", "tests"]
PATIENCE_S = 120.0
SMALL = ("steps=3", "generator.count=1", "learner.ranks=1", "env.servers=1", "eval.tasks=0")

pytestmark = [pytest.mark.docs, pytest.mark.skipif(bool(missing()), reason=f"several machines on one box: {missing()}")]


def begin(
    machines: Machines,
    python: str,
    engine: str,
    runs: Path,
    environment: Mapping[str, str],
    submit: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """`fresco run` on machine 1, or a command that submits it."""
    network = ("network.transport=tcp", f"network.host={machines.address(1)}")
    nodes = [machines.address(number) for number in range(2, COUNT + 2)] if engine == "ssh" else COUNT
    cluster = (f"cluster.engine={engine}", f"cluster.nodes={nodes}")
    told = [f"runs={runs}", *network, *cluster, *SMALL, *overrides]
    command = [*submit, python, "-m", "launch.cli", "run", "simulated", *told]
    with (runs / "head.log").open("w") as log:
        return machines.begin(1, command, cwd=runs, env=environment, stdout=log, stderr=log)


def ours(machines: Machines) -> list[str]:
    """What of ours runs on any machine."""
    numbers = range(1, machines.count + 1)
    return [line for number in numbers for line in machines.processes(number) if OURS.search(line)]


def run(
    machines: Machines,
    python: str,
    engine: str,
    runs: Path,
    environment: Mapping[str, str],
    submit: Sequence[str] = (),
) -> dict[str, Any]:
    """The summary of a run, after which nothing of ours is left on any machine."""
    head = begin(machines, python, engine, runs, environment, submit)
    assert head.wait(PATIENCE_S) == 0, (runs / "head.log").read_text()

    assert not ours(machines)
    summary: dict[str, Any] = json.loads((runs / "simulated" / "summary.json").read_text())
    return summary


def with_sshd(machines: Machines, folder: Path) -> None:
    """A daemon with a key of its own on each machine but the first, whose user may enter there."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir, ".ssh")
    for name in ("user", *(f"host{number}" for number in range(2, COUNT + 2))):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    machines.run(1, f"mkdir -p {home}; mount -t tmpfs -o mode=700 ssh {home}; cp {folder}/user {home}/id_ed25519")

    for number in range(2, COUNT + 2):
        settings = {
            "ListenAddress": machines.address(number),
            "HostKey": folder / f"host{number}",
            "AuthorizedKeysFile": folder / "user.pub",
            "StrictModes": "no",  # about the folder that all can write in which this one stands
            "UsePAM": "no",
            "PidFile": "none",
        }
        config = folder / f"sshd{number}"
        config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        machines.run(
            number, f"mount -t tmpfs run /run; mkdir /run/sshd; {SSHD} -f {config} -E {folder}/sshd{number}.log"
        )
        key = (folder / f"host{number}.pub").read_text()
        machines.run(1, f"echo '{machines.address(number)} {key.strip()}' >> {home}/known_hosts")


def with_slurm(machines: Machines, folder: Path) -> None:
    """A controller on machine 1 and a daemon on each; all see the folder."""
    (folder / "munge.key").write_bytes(os.urandom(1024))
    for number in range(1, machines.count + 1):
        boot = ["bash", str(ROOT / "tests" / "slurm.sh"), str(folder), SLURM, str(number), str(machines.count)]
        booted = machines.begin(number, boot, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert booted.wait(PATIENCE_S) == 0, booted.communicate()[0]

    def idle() -> str:
        return machines.run(1, "sinfo -h -o '%D %t' || true").strip()

    wait_for(lambda: idle() == f"{machines.count} idle", idle)


def with_ray(machines: Machines, dashboard: bool = False) -> dict[str, str]:
    """A raylet on each machine. Returns the environment of who begins a run there: without our code, which comes with
    the job."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    environment = os.environ | quiet | {"PATH": f"{RAY_HOME}/bin:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    shown = f"--include-dashboard={str(dashboard).lower()}", f"--dashboard-host={machines.address(1)}"

    for number in range(1, machines.count + 1):
        where = ["--head", "--port=6379", *shown] if number == 1 else [f"--address={machines.address(1)}:6379"]
        start = [f"{RAY_HOME}/bin/ray", "start", *where, f"--node-ip-address={machines.address(number)}"]
        sizes = ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats"]
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started = machines.begin(number, [*start, *sizes], cwd="/tmp", env=environment, **options)
        said = started.communicate(timeout=PATIENCE_S)[0]
        assert started.returncode == 0, said
    return environment


@pytest.mark.skipif(not SSHD, reason="no sshd: apt-get install openssh-server")
@pytest.mark.parametrize("ends", ["in order", "by a kill of the head"])
def test_a_real_sshd_starts_an_agent_that_dies_with_the_run(tmp_path: Path, ends: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with Machines(COUNT + 1, shared={number: [tmp_path] for number in range(1, COUNT + 2)}) as machines:
        with_sshd(machines, tmp_path)
        if ends == "in order":
            assert run(machines, sys.executable, "ssh", tmp_path, environment)["steps"] == 3
        else:
            endless = ("steps=100000", "cluster.lease_s=2")
            head = begin(machines, sys.executable, "ssh", tmp_path, environment, overrides=endless)
            trained = tmp_path / "simulated" / "metrics.jsonl"
            told = (tmp_path / "head.log").read_text
            wait_for(lambda: trained.exists() or head.poll() is not None, told)
            assert len(ours(machines)) > COUNT, told()
            (inside,) = psutil.Process(head.pid).children()  # in the namespaces of machine 1
            inside.kill()
            wait_for(lambda: not ours(machines), lambda: "\n".join(ours(machines)))


@pytest.mark.skipif(not SLURM, reason=NO_SLURM)
def test_slurm_starts_an_agent_on_each_machine(tmp_path: Path) -> None:
    shared = {number: [tmp_path, Path(SLURM)] for number in range(1, COUNT + 1)}
    with Machines(COUNT, shared=shared) as machines:
        with_slurm(machines, tmp_path)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        assert run(machines, sys.executable, "slurm", tmp_path, environment)["steps"] == 3
        assert len(list(tmp_path.glob("fresco-agent-*.log"))) == COUNT
        wait_for(lambda: not machines.run(1, "squeue -h").strip(), lambda: "jobs are left")


@pytest.mark.skipif(not RAY, reason=NO_RAY)
@pytest.mark.parametrize("how", ["a driver", "a job"])
def test_ray_starts_an_agent_on_each_machine(tmp_path: Path, how: str) -> None:
    """A job is submitted by `ray job submit`, for which Ray needs the packages of `ray[default]`."""
    if how == "a job" and subprocess.run([RAY, "-c", "import ray.dashboard.optional_deps"]).returncode:
        pytest.skip("no ray[default] in the Python of FRESCO_TEST_RAY")
    with Machines(COUNT, shared={number: [tmp_path, RAY_HOME] for number in range(1, COUNT + 1)}) as machines:
        environment = with_ray(machines, dashboard=how == "a job")
        if how == "a job":
            address = f"http://{machines.address(1)}:8265"
            code = ["--working-dir", str(ROOT), "--runtime-env-json", json.dumps({"excludes": NOT_SENT})]
            submit = [f"{RAY_HOME}/bin/ray", "job", "submit", "--address", address, *code, "--"]
            assert run(machines, RAY, "ray", tmp_path, environment, submit)["steps"] == 3
            assert "succeeded" in (tmp_path / "head.log").read_text()
        else:
            driver = environment | {"PYTHONPATH": str(ROOT)}
            assert run(machines, RAY, "ray", tmp_path, driver)["steps"] == 3
        assert "agent ended" not in (tmp_path / "head.log").read_text()
