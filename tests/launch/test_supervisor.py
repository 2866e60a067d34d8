"""The supervisor's promises, with real processes: one first cause, restarts, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch import supervisor
from launch.cpu.fork_server import ForkServer
from launch.launcher.local import Command, Files, LocalLauncher, begin_process
from launch.launcher.protocol import Found, Handle, Launcher, Node, Spec
from launch.plan import ProcessSpec
from launch.supervisor import Supervisor
from rl.wire.messages import Fatal, Message
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.launch.hanging_engine import BLOCKS_AT, WORKS_S

pytestmark = pytest.mark.slow

QUIET = ("tracking.wandb=disabled", "timeouts.stop_s=2", "timeouts.heartbeat_s=0.05")


@dataclass(frozen=True)
class FakeSpec(ProcessSpec):
    module: str = "tests.launch.fake_role"
    imports: tuple[str, ...] = ("tests.launch.fake_role",)

    def arguments(self, run: RunFile, incarnation: int, node: Node) -> list[str]:
        return [self.role, *super().arguments(run, incarnation, node)]


SERVERS: list[ForkServer] = []


@pytest.fixture(autouse=True, scope="module")
def server() -> Iterator[None]:
    """The processes are copies of one that has imported: else these tests would be imports for the most part."""
    SERVERS.append(ForkServer(FakeSpec.imports, {"OMP_NUM_THREADS": "1"}))
    yield
    SERVERS.pop().close()


def begin(command: Command, files: Files) -> psutil.Process:
    copy = SERVERS[0].begin(command, files) if SERVERS and command.imports else None
    return copy or begin_process(command, files)


def supervise(run: RunFile, plan: list[ProcessSpec]) -> int:
    return Supervisor(run, plan, LocalLauncher(run, begin)).execute()


def execute(run: RunFile, **behaviours: str) -> tuple[int, dict[str, object]]:
    plan: list[ProcessSpec] = [
        FakeSpec(role, 0, environment={f"FAKE_{role.upper()}": behaviours.get(role, "")})
        for role in ("broker", "proxy", "generator", "env_server", "learner")
    ]

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    code = supervise(run, plan)
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


def test_a_healthy_end_may_take_longer_than_that_of_a_run_that_is_stopped(
    run: RunFile, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a busy machine: past timeouts.stop_s = 2."""
    code, _ = execute(run, broker="done", learner="done", generator="slow end")
    assert code == 0 and (run.folder / "ended").exists()
    assert "killed after" not in capsys.readouterr().out


class Took(LocalLauncher):
    """Has found processes that were begun before."""

    def __init__(self, run: RunFile) -> None:
        super().__init__(run, begin)
        self.found: dict[str, Found] = {}

    def find(self, run: RunFile, spec: ProcessSpec, incarnation: int, *, alive: bool) -> None:
        node = self.place(spec.role, spec.index)
        (run.folder / "logs").mkdir(exist_ok=True)
        handle = self.start(spec.complete(run, incarnation, node), node)
        if not alive:
            handle.kill()
            handle.wait(10)
        self.found[spec.name] = Found(incarnation, handle)


def test_a_supervisor_that_takes_over_goes_on_with_what_lives_and_replaces_what_has_ended(run: RunFile) -> None:
    """All hear of every death before: it may have been told to nobody."""
    run.make_names()
    rows = [{"step": step, "time": time.time(), "train/loss": 0.0, "version/timeline": 0.0} for step in (1, 2)]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    roles = {"broker": "done3", "generator": "tell", "learner": "done3"}
    plan = {role: FakeSpec(role, 0, environment={f"FAKE_{role.upper()}": told}) for role, told in roles.items()}
    launcher = Took(run)
    launcher.find(run, plan["broker"], 0, alive=False)
    launcher.find(run, plan["generator"], 2, alive=True)
    launcher.find(run, plan["learner"], 0, alive=True)
    assert Supervisor(run, [*plan.values()], launcher).execute() == 0

    logs = {path.stem for path in (run.folder / "logs").iterdir()}
    assert logs == {"broker.0.0", "broker.0.1", "generator.0.2", "learner.0.0"}
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == 2


def test_a_run_that_failed_ends_in_time(run: RunFile, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = execute(run, proxy="raise once a generator is up", generator="slow end")
    assert code == 1 and not (run.folder / "ended").exists()
    assert "killed after 2 s: generator.0" in capsys.readouterr().out


def test_what_the_caller_had_started_goes_on(run: RunFile) -> None:
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo; wait"], stdout=subprocess.PIPE) as shell:
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
    code, summary = execute(run, **{role: "raise"})
    assert code == 1 and summary["error"] == f"{role}.0: ValueError: the first cause"
    assert "the first cause" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("role", "end"),
    [
        *(("generator", "die"), ("env_server", "die"), ("generator", "exit"), ("generator", "raise later")),
        *(("proxy", "exit"), ("proxy", "raise later"), ("env_server", "give up")),
    ],
)
def test_whoever_ends_is_replaced_and_its_peers_are_told(run: RunFile, role: str, end: str) -> None:
    code, _ = execute(run, **{role: end, "broker": "done1", "learner": "done1"})
    assert code == 0
    assert (run.folder / "logs" / f"{role}.0.1.log").exists()


def test_an_exception_is_shown_when_it_comes(run: RunFile, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = execute(run, proxy="raise later", broker="done1", learner="done1")
    shown = capsys.readouterr().out
    assert code == 0 and "proxy.0 ValueError: the first cause; starting it again (1 of 3)" in shown
    assert "Traceback" in shown and 'raise ValueError("the first cause")' in shown


def test_what_would_come_again_ends_the_run_in_one_line(run: RunFile, capsys: pytest.CaptureFixture[str]) -> None:
    code, summary = execute(run, proxy="give up")
    assert code == 1 and summary["error"] == "proxy.0: CheckpointError: step-8/state was damaged"
    assert "Traceback" not in capsys.readouterr().out


class Late(Supervisor):
    """It reads of an exception in its second wait after the kernel has told of the process's end."""

    def __init__(self, run: RunFile, plan: list[ProcessSpec], launcher: Launcher) -> None:
        self.held: list[tuple[Message, bytes]] = []
        self.waits = 0
        super().__init__(run, plan, launcher)

    def _handle(self, message: Message, peer: bytes) -> None:
        if isinstance(message, Fatal):
            self.held.append((message, peer))
        else:
            super()._handle(message, peer)

    def _drain(self, patience_s: float = 0.0) -> None:
        super()._drain(patience_s)
        ended = any(child.handle.poll() is not None for child in self._children.values())
        self.waits += ended and patience_s > 0
        while self.held and self.waits >= 2:
            super()._handle(*self.held.pop())


@pytest.mark.parametrize(("end", "code"), [("give up", 1), ("raise later", 0)])
def test_an_exception_is_heard_after_the_end_of_its_process(
    run: RunFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str, code: int
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Supervisor", Late)
    ended, _ = execute(run, proxy=end, broker="done1", learner="done1")
    assert ended == code
    assert ("state was damaged" if code else "proxy.0 ValueError: the first cause; starting") in capsys.readouterr().out


def test_who_registers_late_hears_of_earlier_deaths(run: RunFile) -> None:
    code, _ = execute(run, generator="die", broker="late done1", learner="late done1")
    assert code == 0


def test_the_report_of_a_dead_process_does_not_stand_for_that_of_its_successor(run: RunFile) -> None:
    code, summary = execute(run, broker="report and die", learner="done1")
    assert code == 0
    assert summary["staleness"] == 1


class Unaware(Supervisor):
    """It hears of the ends of processes seconds after their last words."""

    turns = 0

    def _check_children(self) -> None:
        self.turns += bool(self._reports)
        if not self._reports or self.turns > 60:
            super()._check_children()


def test_broker_and_learner_that_raise_at_once_do_not_end_the_run(
    run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Supervisor", Unaware)
    code, summary = execute(run, broker="report and raise", learner="report and raise")
    assert (code, summary["staleness"]) == (0, 1)


def test_restarts_are_limited(run: RunFile) -> None:
    code, summary = execute(run, generator="die always")
    assert code == 1 and "generator.0 ended: killed by SIGKILL; it was restarted 3 times already" in str(
        summary["error"]
    )


@pytest.mark.parametrize(("learner", "code"), [("step by step", 0), ("", 1)])
def test_an_old_death_does_not_count_once_the_run_has_come_further(
    run: RunFile, monkeypatch: pytest.MonkeyPatch, learner: str, code: int
) -> None:
    """A generator that dies three times a second, while there are ten steps a second, or none."""
    monkeypatch.setattr(supervisor, "_HOUR_S", 0.0)
    ended, summary = execute(run, broker="done", generator="die always", learner=learner)
    assert ended == code and ("restarted 3 times already" in str(summary.get("error"))) == bool(code)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_and_the_exceptions_that_follow_are_one_death(run: RunFile, killed: int) -> None:
    """Whoever is heard of first: all ranks start again, together and once."""
    run.config.max_restarts = 1
    ranks = [FakeSpec("learner", rank, environment={"FAKE_LEARNER": "raise beside"}) for rank in (0, 1)]
    ranks[killed] = FakeSpec("learner", killed, environment={"FAKE_LEARNER": "die in step"})
    broker = FakeSpec("broker", 0, environment={"FAKE_BROKER": "done2"})
    assert supervise(run, [broker, *ranks]) == 0
    logs = sorted(path.name for path in (run.folder / "logs").glob("learner.*"))
    assert logs == ["learner.0.0.log", "learner.0.1.log", "learner.1.0.log", "learner.1.1.log"]


def test_a_hung_worker_is_killed_and_replaced(run: RunFile) -> None:
    run.config.timeouts.hang_s = 5  # and no other is that late
    code, _ = execute(run, generator="hang", broker="done1", learner="done1")
    assert code == 0


def test_a_successor_that_hangs_before_it_registers_is_a_death(
    run: RunFile, capsys: pytest.CaptureFixture[str]
) -> None:
    run.config.timeouts.start_s = 10  # a process imports for a second or two, on a busy machine for several
    code, _ = execute(run, generator="die and never start", broker="done2", learner="done2")
    assert code == 0
    assert (
        "generator.0 did not start within timeouts.start_s=10 s; starting it again (2 of 3)" in capsys.readouterr().out
    )


class Grows:
    """The handle of a process whose files are being copied to its machine."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def __getattr__(self, name: str) -> Any:
        return time.monotonic() if name == "came" else getattr(self.handle, name)


class Copies(LocalLauncher):
    """It copies, for ever, what generators need."""

    def start(self, spec: Spec, node: Node) -> Any:
        started = super().start(spec, node)
        return Grows(started) if "generator" in spec.arguments else started


def test_the_broker_hears_that_what_an_engine_needs_comes_nearer(run: RunFile) -> None:
    plan = {"broker": "end while another's files come", "generator": "never start", "learner": "done"}
    specs = [FakeSpec(role, 0, environment={f"FAKE_{role.upper()}": told}) for role, told in plan.items()]
    assert Supervisor(run, [*specs], Copies(run, begin)).execute() == 0
    assert not (run.folder / "logs" / "generator.0.1.log").exists()


def test_an_engine_that_hangs_while_it_starts_is_replaced_and_one_that_works_is_not(
    run: RunFile, capsys: pytest.CaptureFixture[str]
) -> None:
    run.config.timeouts.hang_s = 4
    run.config.generator.engine = "simulated"
    run.save()
    others = [
        FakeSpec(role, 0, environment={f"FAKE_{role.upper()}": "done1"}) for role in ("broker", "proxy", "learner")
    ]
    begin = time.monotonic()
    assert supervise(run, [*others, ProcessSpec("generator", 0, "tests.launch.hanging_engine")]) == 0
    assert time.monotonic() - begin > WORKS_S + run.config.timeouts.hang_s
    shown = capsys.readouterr().out
    assert shown.count("starting it again") == 1
    assert "generator.0 busy without progress for 4 s; starting it again (1 of 3)" in shown


def test_an_engine_that_has_failed_and_does_not_end_is_replaced(
    run: RunFile, capsys: pytest.CaptureFixture[str]
) -> None:
    run.config.timeouts.hang_s = 4
    run.config.generator.engine = "simulated"
    run.save()
    others = [
        FakeSpec(role, 0, environment={f"FAKE_{role.upper()}": "done1"}) for role in ("broker", "proxy", "learner")
    ]
    blocked = ProcessSpec("generator", 0, "tests.launch.hanging_engine", environment={BLOCKS_AT: "end"})
    assert supervise(run, [*others, blocked]) == 0
    shown = capsys.readouterr().out
    assert "generator.0 busy without progress for 4 s; starting it again (1 of 3)" in shown


def test_a_deaf_process_and_detached_grandchildren_are_killed(run: RunFile) -> None:
    limits = run.config.timeouts.model_copy(update={"hang_s": 3.0})
    run = run.model_copy(update={"config": run.config.model_copy(update={"timeouts": limits})})
    run.save()
    code, _ = execute(run, broker="done", learner="done", generator="deaf", env_server="children")
    assert code == 0


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_hanging_up_end_everything(run: RunFile, stop: signal.Signals) -> None:
    """The signal comes from a child, when the supervisor waits for its children."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite may run under nohup, where it is ignored
    try:
        code, _ = execute(run, learner=f"signal {int(stop)}")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 130


@pytest.mark.parametrize(
    ("learner", "saved_bytes", "is_saved"),
    [
        ("saves", 0, False),  # it takes longer than a step and a save without a model may
        ("saves", 200_000_000, True),
        ("trains, then saves", 0, False),
        ("trains, then saves", 200_000_000, True),  # and so does the step before it
    ],
)
def test_ctrl_c_waits_for_a_step_that_advances_and_for_as_many_bytes_as_there_are(
    run: RunFile, learner: str, saved_bytes: int, is_saved: bool
) -> None:
    limits = run.config.timeouts.model_copy(update={"hang_s": 1.0, "heartbeat_s": 0.1})
    config = run.config.model_copy(update={"timeouts": limits})
    run = run.model_copy(update={"config": config, "saved_bytes": saved_bytes})
    run.save()
    code, _ = execute(run, learner=learner)
    assert code == 130 and (run.folder / "saved").exists() == is_saved


def test_a_run_that_ended_by_ctrl_c_says_so_whatever_the_last_heartbeat_said(run: RunFile) -> None:
    code, _ = execute(run, broker="done", learner="ends busy")
    assert code == 130


SUPERVISE = (
    "import sys; from rl.wire.run import RunFile;"
    "from tests.launch.test_supervisor import FakeSpec; from launch.supervisor import Supervisor;"
    "sys.exit(Supervisor(RunFile.load(sys.argv[1]), [FakeSpec(r, 0) for r in ('broker', 'generator')]).execute())"
)


def test_a_fault_of_the_supervisor_itself_ends_the_run_with_its_books(
    run: RunFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(Supervisor, "_record", fails)
    code, summary = execute(run, learner="step")
    assert code == 1 and summary["error"] == "the supervisor failed: ValueError('a fault')"
    assert "Traceback" in capsys.readouterr().out


def test_a_full_disk_is_one_line_and_leaves_nothing(run: RunFile, capsys: pytest.CaptureFixture[str]) -> None:
    (run.folder / "metrics.jsonl").symlink_to("/dev/full")
    code, summary = execute(run, learner="step")
    assert code == 1 and "No space left on device" in str(summary["error"])
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("fresco: the supervisor cannot write to /") and "[Errno 28]" in line


def test_a_closed_pipe_is_one_line_and_leaves_nothing(run: RunFile) -> None:
    """`fresco run | head`: the next line that is shown finds nobody who reads it."""
    command = [sys.executable, "-c", SUPERVISE, str(run.folder)]
    environment = os.environ | {"FAKE_GENERATOR": "die"}
    supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert supervisor.stdout is not None
    supervisor.stdout.close()
    supervisor.stdout = None
    _, errors = supervisor.communicate(timeout=240)
    assert supervisor.returncode == 1 and errors == "fresco: standard output was closed\n"
    assert json.loads((run.folder / "summary.json").read_text())["error"] == "standard output was closed"
    assert not run.socket_folder.exists()


def test_children_die_with_a_killed_supervisor(run: RunFile) -> None:
    command = [sys.executable, "-c", SUPERVISE, str(run.folder)]
    environment = os.environ | {"FAKE_BROKER": "tell", "FAKE_GENERATOR": "tell"}
    supervisor = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)

    try:
        deadline = time.monotonic() + 120
        while len(list(run.folder.glob("up.*"))) < 2:  # both have asked the kernel to die with their parent
            assert time.monotonic() < deadline and supervisor.poll() is None, "the children did not start"
            time.sleep(0.05)
        children = psutil.Process(supervisor.pid).children()
    finally:
        supervisor.kill()
        supervisor.wait()

    _gone, alive = psutil.wait_procs(children, timeout=60)
    assert len(children) == 2 and not alive
