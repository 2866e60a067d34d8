"""Copies of one process that has imported: children of who asked, with their own files, and no longer alive than it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from launch.cpu.fork_server import ForkServer, begin_as_copies
from launch.launcher.local import Command, LocalHandle, begin_process
from launch.plan import make_plan
from rl.config.schema import load_config
from tests.launch.test_bad_configuration import EXPERIMENTS

ROLE = "tests.launch.forked_role"
ROOT = Path(__file__).parents[2]
RECIPES = ["math_cpu", "alfworld_cpu", "swe_cpu"]


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer([ROLE], {})
    yield made
    made.close()


@pytest.fixture
def log() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        yield file


def begin(server: ForkServer, what: str, log: IO[bytes], words: str = "", **environment: str) -> psutil.Process | None:
    with tempfile.TemporaryFile() as stdin:
        stdin.write(words.encode())
        stdin.seek(0)
        return server.begin(Command(ROLE, [what], environment, [ROLE]), (stdin, log, log))


def test_a_copy_is_our_child_and_finds_what_was_imported(server: ForkServer, log: IO[bytes], tmp_path: Path) -> None:
    told = []
    for number in range(2):
        log.seek(0)
        log.truncate()
        copy = begin(server, "say", log, words=f"words {number}", SETTING=str(number), TMPDIR=str(tmp_path))
        assert copy is not None and copy.wait(60) == 0
        assert LocalHandle(copy).poll() == 0

        log.seek(0)
        told.append(json.loads(log.read()))
        assert told[number]["pid"] == told[number]["leader"] == copy.pid
        assert told[number]["parent"] == os.getpid()
        assert told[number]["setting"] == str(number)
        assert told[number]["temporary"] == str(tmp_path)
        assert told[number]["standard input"] == f"words {number}"
        assert told[number]["files"][:3] == [0, 1, 2]
        assert len(told[number]["files"]) <= 4, "it holds files of the server"  # the fourth reads this list

    assert told[0]["imported_in"] == told[1]["imported_in"] not in (told[0]["pid"], told[1]["pid"])


def test_how_a_copy_ends_is_told(server: ForkServer, log: IO[bytes]) -> None:
    failed = begin(server, "fail", log)
    assert failed is not None and failed.wait(60) == 1
    log.seek(0)
    assert b"RuntimeError: on purpose" in log.read()

    killed = begin(server, "sleep", log)
    assert killed is not None and LocalHandle(killed).poll() is None
    killed.kill()
    assert killed.wait(60) == -signal.SIGKILL == LocalHandle(killed).poll()


def test_a_dead_server_begins_nothing_and_its_copies_live(server: ForkServer, log: IO[bytes]) -> None:
    copy = begin(server, "sleep", log)
    assert copy is not None
    process = psutil.Process(server._server.pid)
    process.kill()
    process.wait(60)

    assert begin(server, "say", log) is None
    assert LocalHandle(copy).poll() is None
    copy.kill()
    copy.wait(60)


def test_a_server_that_does_not_answer_is_ended_and_begins_nothing(log: IO[bytes]) -> None:
    server = ForkServer([], {}, deadline_s=1)
    process = psutil.Process(server._server.pid)
    process.suspend()
    assert begin(server, "say", log) is None
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert begin(server, "say", log) is None
    server.close()


DYING = """
import os, signal, sys
server = sys.modules["__main__"]
copy = server._copy

def copy_and_die(*request):
    pid = copy(*request)
    if pid is not None:
        print(pid, file=open({told!r}, "w"), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

server._copy = copy_and_die
"""


def test_a_copy_that_nobody_was_told_of_ends(log: IO[bytes], tmp_path: Path) -> None:
    told = tmp_path / "pid"
    (tmp_path / "dying.py").write_text(DYING.format(told=str(told)))
    server = ForkServer([], {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    try:
        assert server.begin(Command(ROLE, ["sleep"], {}, [ROLE, "dying"]), (log, log, log)) is None
    finally:
        server.close()

    pid = int(told.read_text())
    if psutil.pid_exists(pid):
        assert psutil.Process(pid).wait(120) == 1
    log.seek(0)
    assert log.read() == b""


STARTER = f"""
import sys
from pathlib import Path
from launch.cpu.fork_server import ForkServer
from launch.launcher.local import Command
server = ForkServer([], {{}})
log = Path(sys.argv[1]).open("wb")
copy = server.begin(Command("{ROLE}", ["sleep"], {{}}), (Path("/dev/null").open(), log, log))
print(copy.pid, server._server.pid, flush=True)
sys.stdin.read()
"""


def test_server_and_copies_die_with_who_asked_for_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        starter.kill()

    gone, alive = psutil.wait_procs(processes, timeout=240)
    assert len(gone) == 2 and not alive


WAITS = """
import sys
import threading
import traceback
from launch.cpu.fork_server import is_alone, living_threads
for thread in threading.enumerate():
    print(thread, traceback.format_stack(sys._current_frames().get(thread.ident))[-3:])
print(is_alone(30), living_threads())
"""


def test_what_the_recipes_import_leaves_one_thread() -> None:
    """A thread is not copied, nor what it holds: whoever waits for either in a copy waits for ever."""
    parsers = ["chat.parser=vllm:hermes"]
    plans = [make_plan(load_config(EXPERIMENTS / f"{recipe}.yaml", parsers), "cpu") for recipe in RECIPES]
    imports = sorted({name for plan in plans for spec in plan for name in spec.imports})
    assert {"rl.learner.process", "rollout.generator.engines.vllm", "rollout.parsers.process"} <= {*imports}

    environment = dict(os.environ)
    for spec in (spec for plan in plans for spec in plan):
        environment |= spec.environment
    environment["OMP_NUM_THREADS"] = "1"  # as the server's own

    script = f"import launch.prepare, {', '.join(imports)}\n{WAITS}"
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=240)
    assert told.stdout.splitlines()[-1:] == ["True ['python R']"], (
        f"{told.stdout}\n{told.stderr}\n{sorted(environment)}"
    )


THREADED = """
import threading, time
threading.Thread(target=time.sleep, args=[{seconds}]).start()
"""


@pytest.mark.parametrize(("seconds", "copied"), [(0.5, True), (60, False)])
def test_no_copy_is_made_while_there_is_a_second_thread(
    log: IO[bytes], tmp_path: Path, seconds: float, copied: bool
) -> None:
    (tmp_path / "threaded.py").write_text(THREADED.format(seconds=seconds))
    server = ForkServer([], {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    try:
        copy = server.begin(Command(ROLE, ["say"], {}, [ROLE, "threaded"]), (log, log, log))
        assert (copy is not None) == copied
        if copy is not None:
            assert copy.wait(60) == 0
        else:
            assert begin(server, "say", log) is None
    finally:
        server.close()


@pytest.mark.parametrize("recipe", ["simulated.yaml", "math_8gpu.yaml"])
def test_nothing_is_shared_on_gpus(recipe: str) -> None:
    with begin_as_copies(load_config(EXPERIMENTS / recipe, ["device=cuda"])) as begin_child:
        assert begin_child is begin_process


def test_a_simulated_run_shares_what_its_processes_are(log: IO[bytes]) -> None:
    with begin_as_copies(load_config(EXPERIMENTS / "simulated.yaml", [])) as begin_child:
        begun = begin_child(Command("envs.server", [], {}), (log, log, log))
        assert not isinstance(begun, psutil.Popen) and begun.wait(60) != 0


def test_a_copy_that_leads_no_group_yet_is_killed(log: IO[bytes]) -> None:
    """A rank is replaced with its peers, which may have begun in this moment."""
    handle = LocalHandle(psutil.Popen(["sleep", "600"], stdout=log))
    handle.kill()
    assert handle.wait(60) == -signal.SIGKILL
