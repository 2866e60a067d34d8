"""Agents as real processes, brought by `ssh`: killed, stopped, leaving, joining late. Nothing of them is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launch.commands.join import KEEPER, named, sweep
from launch.launcher.cluster import ClusterLauncher
from launch.plan import ProcessSpec
from launch.supervisor import Supervisor
from rl.config.schema import ConfigError
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.launch.test_supervisor import QUIET, FakeSpec

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0
CLUSTER = ("cluster.engine=ssh", "cluster.nodes=[one,two]", "cluster.lease_s=4", "network.transport=tcp")
PLACE = "cluster.place={generator: [2], env_server: [1], learner: [1]}"
PLAN: list[ProcessSpec] = [FakeSpec(role, 0) for role in ("broker", "proxy", "generator", "env_server", "learner")]


@pytest.fixture
def run(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFile]:
    made = make_run(*QUIET, *CLUSTER, PLACE)
    made = made.model_copy(update={"socket_folder": made.folder / "ipc"})
    made.socket_folder.mkdir()
    made.save()
    ssh = tmp_path / "ssh"
    shutil.copy(Path(__file__).with_name("ssh.sh"), ssh)
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_GENERATOR", "tell")
    yield made
    left = [process for process in psutil.process_iter() if _is_of(process, made)]
    assert not left, "processes were left behind"


def _is_of(process: psutil.Process, run: RunFile) -> bool:
    try:
        return any(str(run.folder) in word for word in process.cmdline()) and process.pid != os.getpid()
    except psutil.Error:
        return False


def execute(run: RunFile, meanwhile: Callable[[ClusterLauncher], None], deaths: int) -> None:
    """A run that ends once broker and learner have heard of so many deaths."""
    for role in ("BROKER", "LEARNER"):
        os.environ[f"FAKE_{role}"] = f"done{deaths}"
    launcher = ClusterLauncher(run)
    failed: list[BaseException] = []

    def act() -> None:
        try:
            wait_for(lambda: (run.folder / "up.generator").exists())
            meanwhile(launcher)
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=act)
    thread.start()
    code = Supervisor(run, PLAN, launcher).execute()
    thread.join()
    assert code == 0 and not failed


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def below(host: str, tmp_path: Path) -> list[psutil.Process]:
    """The keeper of a machine, then what it has begun."""
    shell = psutil.Process(int((tmp_path / f"{host}.pid").read_text()))
    (keeper,) = [each for each in shell.children() if "join" in each.cmdline()]
    return [keeper, *keeper.children(recursive=True)]


def test_a_killed_agent_takes_its_processes_with_it_and_a_late_machine_gets_them_back(
    run: RunFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(launcher: ClusterLauncher) -> None:
        keeper, *others = below("two", tmp_path)
        keeper.kill()
        _gone, alive = psutil.wait_procs(others, timeout=PATIENCE_S)
        assert len(others) >= 2 and not alive

        wait_for(lambda: "generator.0.1" in holds(launcher, 1))
        key = str(run.folder / "agents.key")
        command = [sys.executable, "-m", "launch.cli", "join", launcher.address, "--key", key]
        late = subprocess.Popen(command, cwd=ROOT)
        wait_for(lambda: "generator.0.2" in holds(launcher, 2))
        launcher._handles["generator.0.2"].kill()
        assert late.wait(PATIENCE_S) == 0, "it ends with the run"

    execute(run, kill, deaths=3)
    said = capsys.readouterr().out
    assert "machine 2 is lost" in said and "it goes back to machine 2" in said


def holds(launcher: ClusterLauncher, number: int) -> list[str]:
    with launcher._lock:
        return [name for each in launcher._members.by_agent.values() if each.number == number for name in each.holds]


def test_an_agent_that_hangs_ends_with_its_lease(run: RunFile, tmp_path: Path) -> None:
    def stop(launcher: ClusterLauncher) -> None:
        keeper, *others = below("two", tmp_path)
        (agent,) = [each for each in others if "launch.agent" in each.cmdline() and "unshare" not in each.cmdline()]
        agent.suspend()
        _gone, alive = psutil.wait_procs(others, timeout=PATIENCE_S)
        assert not alive and "generator.0.0" in holds(launcher, 2), "it was taken for lost before"
        assert keeper.wait(PATIENCE_S) in (3, None)

    execute(run, stop, deaths=1)


def test_a_machine_leaves_in_good_order(run: RunFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def leave(launcher: ClusterLauncher) -> None:
        keeper, *others = below("two", tmp_path)
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(PATIENCE_S) in (0, None)
        assert not psutil.wait_procs(others, timeout=PATIENCE_S)[1]

    execute(run, leave, deaths=1)
    assert "its machine 2 leaves" in capsys.readouterr().out


def test_a_host_that_cannot_be_reached_is_said_at_once(run: RunFile, tmp_path: Path) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 255\n")
    with pytest.raises(ConfigError, match=r"the agent of (one|two) ended with exit code 255"):
        ClusterLauncher(run)


def test_what_a_dead_keeper_left_is_swept_and_what_a_living_one_keeps_is_not() -> None:
    dead = subprocess.Popen(["true"])
    names = {"living": " ".join(named(os.getpid())), "dead": f"{named(os.getpid())[0]} {dead.pid} 1"}
    names["elsewhere"] = f"pid:[1] {dead.pid} 1"  # of another namespace, where that pid may live
    dead.wait()
    begun = {name: subprocess.Popen(["sleep", "60"], env=os.environ | {KEEPER: kept}) for name, kept in names.items()}
    try:
        sweep()
        assert begun["dead"].wait(PATIENCE_S) == -signal.SIGKILL
        assert begun["living"].poll() is None and begun["elsewhere"].poll() is None
    finally:
        for process in begun.values():
            process.kill()
            process.wait()
