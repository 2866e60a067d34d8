"""The supervisor's promises, with real processes: one first cause, restarts, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from launch.plan import ProcessSpec
from launch.supervisor import Supervisor
from rl.core.run import RunFile
from tests.conftest import MakeRun

QUIET = ("tracking.wandb=disabled", "tracking.live=false", "timeouts.stop_s=2", "timeouts.heartbeat_s=0.05")


@dataclass(frozen=True)
class FakeSpec(ProcessSpec):
    def command(self, run: RunFile, incarnation: int) -> list[str]:
        options = ["--run", str(run.folder), "--index", str(self.index), "--incarnation", str(incarnation)]
        return [sys.executable, "-m", "tests.launch.fake_role", self.role, *options]


def execute(run: RunFile, **behaviours: str) -> tuple[int, dict[str, object]]:
    plan: list[ProcessSpec] = [
        FakeSpec(role, 0, "", environment={f"FAKE_{role.upper()}": behaviours.get(role, "")})
        for role in ("broker", "proxy", "generator", "env_server", "learner")
    ]

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    code = Supervisor(run, plan).execute()
    after = {process.pid for process in psutil.Process().children(recursive=True)}
    assert after <= before, "processes were left behind"
    assert not list(Path("/dev/shm").glob(f"fresco-{run.run_id}*"))
    assert not run.socket_folder.exists() or not list(run.socket_folder.glob("*.sock"))
    return code, json.loads((run.folder / "summary.json").read_text())


@pytest.fixture
def run(make_run: MakeRun) -> RunFile:
    made = make_run(*QUIET)
    sockets = made.folder / "ipc"
    sockets.mkdir()
    made = made.model_copy(update={"socket_folder": sockets})
    made.save()
    return made


def test_success_ends_every_process(run: RunFile) -> None:
    code, summary = execute(run, broker="done", learner="done")
    assert code == 0 and "error" not in summary and not run.socket_folder.exists()


def test_what_the_caller_had_started_goes_on(run: RunFile) -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None and shell.stdout.readline() == b"\n"  # the shell has a child
        mine = [psutil.Process(shell.pid), *psutil.Process(shell.pid).children()]
        code, _ = execute(run, broker="done", learner="done")
        alive = [process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in mine]
        for process in mine:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    assert code == 0 and alive == [True, True]


@pytest.mark.parametrize("role", ["broker", "proxy", "generator", "env_server", "learner"])
def test_exception_in_any_role_ends_the_run_with_the_first_cause(
    run: RunFile, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    code, summary = execute(run, **{role: "raise"})
    assert code == 1 and summary["error"] == f"{role}.0: ValueError: the first cause"
    assert "the first cause" in capsys.readouterr().out
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("role", ["generator", "env_server"])
def test_a_killed_worker_is_replaced_and_its_peers_are_told(run: RunFile, role: str) -> None:
    code, _ = execute(run, **{role: "die", "broker": "done1", "learner": "done1"})
    assert code == 0
    assert (run.folder / "logs" / f"{role}.0.1.log").exists()


def test_who_registers_late_hears_of_earlier_deaths(run: RunFile) -> None:
    code, _ = execute(run, generator="die", broker="late done1", learner="late done1")
    assert code == 0


def test_restarts_are_limited(run: RunFile) -> None:
    code, summary = execute(run, generator="die always")
    assert code == 1 and "generator.0 ended: killed by SIGKILL; it was restarted 3 times already" in str(
        summary["error"]
    )


@pytest.mark.parametrize("role", ["broker", "proxy", "learner"])
def test_death_of_a_single_role_ends_the_run(run: RunFile, role: str) -> None:
    code, summary = execute(run, **{role: "die"})
    assert code == 1 and f"{role}.0 ended: killed by SIGKILL" in str(summary["error"])


def test_a_hung_worker_is_killed_and_replaced(run: RunFile) -> None:
    run.config.timeouts.hang_s = 1
    code, _ = execute(run, generator="hang", broker="done1", learner="done1")
    assert code == 0


def test_a_deaf_process_and_detached_grandchildren_are_killed(run: RunFile) -> None:
    begin = time.monotonic()
    code, _ = execute(run, broker="done", learner="done", generator="deaf", env_server="children")
    assert code == 0 and time.monotonic() - begin < 10


def test_ctrl_c_ends_everything_within_ten_seconds(run: RunFile) -> None:
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    code, _ = execute(run)
    assert code == 130 and time.monotonic() - begin < 10


def test_children_die_with_a_killed_supervisor(run: RunFile) -> None:
    code = (
        "import sys; from pathlib import Path; from rl.core.run import RunFile;"
        "from tests.launch.test_supervisor import FakeSpec; from launch.supervisor import Supervisor;"
        "Supervisor(RunFile.load(sys.argv[1]), [FakeSpec(r, 0, '') for r in ('broker', 'generator')]).execute()"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code, str(run.folder)], stdout=subprocess.DEVNULL)

    try:
        children: list[psutil.Process] = []
        deadline = time.monotonic() + 20
        while len(children) < 2 and time.monotonic() < deadline:
            children = psutil.Process(supervisor.pid).children()
            time.sleep(0.05)
        time.sleep(1.0)  # until both have asked the kernel to die with their parent
    finally:
        supervisor.kill()
        supervisor.wait()

    _gone, alive = psutil.wait_procs(children, timeout=5)
    assert len(children) == 2 and not alive
