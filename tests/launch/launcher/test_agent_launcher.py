"""A launcher of a third party, which is one file: the supervisor keeps its promises with it as with `local`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from launch.launcher import make_launcher
from launch.launcher.protocol import Node, Spec
from launch.plan import ProcessSpec
from launch.supervisor import Supervisor
from rl.config.schema import ConfigError
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.launch.test_supervisor import QUIET, FakeSpec

NAME = "launcher=tests.launch.agent_launcher:AgentLauncher"
ROLES = ("broker", "proxy", "generator", "env_server", "learner")


@pytest.fixture
def run(make_run: MakeRun) -> RunFile:
    made: RunFile = make_run(*QUIET, NAME, "network.transport=tcp")
    made = made.model_copy(update={"socket_folder": made.folder / "ipc"})
    made.socket_folder.mkdir()
    made.save()
    return made


def execute(run: RunFile, **behaviours: str) -> int:
    plan: list[ProcessSpec] = [
        FakeSpec(role, 0, environment={f"FAKE_{role.upper()}": behaviours.get(role, "")}) for role in ROLES
    ]
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    code = Supervisor(run, plan, make_launcher(run)).execute()
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before, (
        "processes were left behind"
    )
    return code


@pytest.mark.parametrize("role", ["proxy", "generator"])
def test_a_killed_process_is_noticed_told_and_replaced(
    run: RunFile, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviours = dict.fromkeys(("broker", "learner"), "done1")
    assert execute(run, **{role: "die" if role == "generator" else "exit"}, **behaviours) == 0
    how = "killed by SIGKILL" if role == "generator" else "exit code 3"
    assert f"{role}.0 {how}; starting it again (1 of 3)" in capsys.readouterr().out


def test_a_hung_process_is_killed_and_replaced(run: RunFile) -> None:
    run.config.timeouts.hang_s = 5
    assert execute(run, generator="hang", broker="done1", learner="done1") == 0


def test_deaf_processes_and_detached_grandchildren_end_with_the_run(run: RunFile) -> None:
    assert execute(run, broker="done", learner="done", generator="deaf", env_server="children") == 0


SUPERVISE = f"""
import sys
from launch.launcher import make_launcher
from launch.supervisor import Supervisor
from rl.wire.run import RunFile
from tests.launch.test_supervisor import FakeSpec
run = RunFile.load(sys.argv[1])
Supervisor(run, [FakeSpec(role, 0) for role in {ROLES}], make_launcher(run)).execute()
"""


def test_nothing_survives_a_killed_supervisor(run: RunFile) -> None:
    environment = os.environ | {f"FAKE_{role.upper()}": "tell" for role in ROLES}
    command = [sys.executable, "-c", SUPERVISE, str(run.folder)]
    supervisor = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    try:
        deadline = time.monotonic() + 120
        while len(list(run.folder.glob("up.*"))) < len(ROLES):
            assert time.monotonic() < deadline and supervisor.poll() is None, "the processes did not start"
            time.sleep(0.05)
        below = psutil.Process(supervisor.pid).children(recursive=True)
    finally:
        supervisor.kill()
        supervisor.wait()

    _gone, alive = psutil.wait_procs(below, timeout=60)
    assert len(below) >= len(ROLES) + 2 and not alive


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("slurm", "launcher='slurm' is not a registered name"),
        ("tests.launch.agent_launcher:Nobody", "no 'Nobody' in it"),
        ("tests.launch.agent_launcher:AgentHandle", "it has no method 'place'"),
    ],
)
def test_a_launcher_that_is_none_is_refused_in_one_line(make_run: MakeRun, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_launcher(make_run(f"launcher={name}"))


class Placeless:
    """All that a launcher needs is there, and nothing of it is written yet."""

    def __init__(self, run: RunFile) -> None: ...

    def place(self, role: str, index: int) -> Any: ...

    def start(self, spec: Spec, node: Node) -> Any: ...

    def close(self) -> None: ...


class Handleless(Placeless):
    def place(self, role: str, index: int) -> Node:
        return Node("here", "127.0.0.1")


class Wrapped(Handleless):
    def start(self, spec: Spec, node: Node) -> Any:
        return subprocess.Popen(["no-such-wrapper", *spec.command()])


@pytest.mark.parametrize(
    ("launcher", "told"),
    [
        (Placeless, "TypeError: place returned None, which is no Node"),
        (Handleless, "TypeError: start returned None, a handle without poll, kill, wait, fileno"),
        (Wrapped, "FileNotFoundError: [Errno 2] No such file or directory: 'no-such-wrapper'"),
    ],
)
def test_what_a_launcher_does_wrong_is_one_line_that_names_it(
    make_run: MakeRun, launcher: type, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{__name__}:{launcher.__name__}"
    run = make_run(*QUIET, f"launcher={name}")
    assert Supervisor(run, [FakeSpec("broker", 0)], make_launcher(run)).execute() == 1
    printed = "".join(capsys.readouterr())
    assert f"launcher='{name}' could not start broker.0: {told}" in printed
    assert "Traceback" not in printed


class Forking(Handleless):
    """As a wrapper that forks and ends: the process goes on without it."""

    def start(self, spec: Spec, node: Node) -> Any:
        return Ended()


class Ended:
    def poll(self) -> int:
        return 0

    def kill(self) -> None: ...

    def wait(self, timeout_s: float) -> int:
        return 0

    def fileno(self) -> int:
        return -1


def test_a_wrapper_that_forks_is_told(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(*QUIET, f"launcher={__name__}:Forking")
    assert Supervisor(run, [FakeSpec("proxy", 0)], make_launcher(run)).execute() == 1
    told = "proxy.0 ended: exit code 0 before it said anything (is it a wrapper that forks?)"
    assert told in capsys.readouterr().out


def test_a_process_with_another_parent_than_it_was_told_ends_and_says_so() -> None:
    """As behind a wrapper that forks: nobody would end it with the run."""
    program = "from rl.wire.process import die_with_parent; die_with_parent(); print('goes on')"
    environment = os.environ | {"FRESCO_PARENT_PID": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 1 and not ended.stdout
    assert "the parent, process 1, died at once, or a wrapper forked" in ended.stderr


ORPHAN = """
import os, sys, time
from rl.wire.process import die_with_parent
parent = os.getppid()
os.write(int(sys.argv[1]), b"!")
until = time.monotonic() + 60
while os.getppid() == parent and time.monotonic() < until:
    time.sleep(0.01)
die_with_parent()
print("goes on")
"""
PARENT = """
import os, subprocess, sys
ready, begun = os.pipe()
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(begun)], pass_fds=[begun])
os.close(begun)
os.read(ready, 1)
"""


def test_a_process_that_was_told_no_parent_ends_where_its_own_is_gone_before_it_serves() -> None:
    """A launcher need not say who the parent is. An orphan would wait for a supervisor for ever."""
    environment = {name: value for name, value in os.environ.items() if name != "FRESCO_PARENT_PID"}
    parent = [sys.executable, "-c", PARENT, ORPHAN]
    ended = subprocess.run(parent, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0 and not ended.stdout
    assert "died at once, or a wrapper forked" in ended.stderr
