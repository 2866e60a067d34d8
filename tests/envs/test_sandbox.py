"""The sandbox's own behaviour: results, limits, copy on write, life cycle, and what a machine without it is told."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envs.sandbox import Command, Limits, SandboxError, Template, detect, read_file, syscalls, write_file
from envs.sandbox.bubblewrap import STATE, BubblewrapBackend
from envs.sandbox.docker import DockerBackend, create_command, exec_command, running_engine
from envs.sandbox.memory import Watchdog
from envs.sandbox.process import CappedOutput
from rl.wire.process import adopt_orphans
from tests.envs.sandboxes import python, sh, world_writable

_PR_GET_CHILD_SUBREAPER = 37
LIMITS = Limits(timeout_s=60)


def test_a_command_runs_on_a_private_copy(backend: BubblewrapBackend, template: Path) -> None:
    first, second = (backend.open(Template(template), LIMITS) for _ in range(2))
    assert sh(first, "cat a.txt; echo changed > a.txt; mkdir d; echo new > d/b; rm gone.txt").text() == "original\n"
    assert sh(first, "cat a.txt d/b; ls").text() == "changed\nnew\na.txt\nd\n"
    assert sh(second, "cat a.txt; ls").text() == "original\na.txt\ngone.txt\n"
    first.close()
    second.close()
    assert (template / "a.txt").read_text() == "original\n" and (template / "gone.txt").exists()


def test_ended_processes_do_not_count_against_the_limit(backend: BubblewrapBackend, template: Path) -> None:
    """However rarely the host's first process reaps: bwrap's inner process is an orphan when it ends."""
    sandbox = backend.open(Template(template), Limits(timeout_s=60, processes=10))
    assert all(sh(sandbox, "/bin/true; /bin/true").ok for _ in range(30))
    sandbox.close()


def test_result(backend: BubblewrapBackend, template: Path) -> None:
    sandbox = backend.open(Template(template), LIMITS)
    assert sh(sandbox, "exit 7").exit_code == 7
    assert sh(sandbox, "kill -TERM $$").exit_code == 128 + 15
    with pytest.raises(SandboxError, match="did not start: bwrap: execvp no-such-program"):
        sandbox.run(Command(["no-such-program"]))
    merged = sh(sandbox, "echo out; echo err >&2")
    assert merged.output == b"out\nerr\n" and not merged.stderr
    apart = sandbox.run(Command(["sh", "-c", "echo out; echo err >&2"], separate_stderr=True))
    assert (apart.output, apart.stderr) == (b"out\n", b"err\n")
    sandbox.close()
    sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        sandbox.run(Command(["true"]))


def test_input_and_environment(backend: BubblewrapBackend, template: Path) -> None:
    sandbox = backend.open(Template(template), LIMITS)
    big = b"x" * 1_000_000
    assert sandbox.run(Command(["wc", "-c"], stdin=big)).text().strip() == "1000000"
    assert sandbox.run(Command(["true"], stdin=big)).ok, "nobody reads it"
    assert sandbox.run(Command(["sh", "-c", "echo $X"], environment={"X": "a b"})).text() == "a b\n"
    sandbox.close()


def test_files_go_in_and_out_as_the_sandboxes_user(backend: BubblewrapBackend, template: Path, tmp_path: Path) -> None:
    sandbox = backend.open(Template(template), LIMITS)
    content = bytes(range(256))
    assert write_file(sandbox, "new folder/it's", content) and read_file(sandbox, "new folder/it's") == content
    assert read_file(sandbox, "missing") is None
    outside = tmp_path / "outside"
    outside.write_text("safe")
    sh(sandbox, f"ln -s {outside} link")
    assert not write_file(sandbox, "link", b"broken") and read_file(sandbox, "link") is None
    assert outside.read_text() == "safe"
    sandbox.close()


def test_a_command_that_the_host_cannot_start_is_no_failed_command(backend: BubblewrapBackend, template: Path) -> None:
    """Here for want of processes. It would be judged as the solution's end, and earn nothing."""
    sandbox = backend.open(Template(template), Limits(processes=1))
    with pytest.raises(SandboxError, match=r"a command of a sandbox did not start: (bwrap|setpriv): "):
        sh(sandbox, "true")
    sandbox.close()

    sandbox = backend.open(Template(template), LIMITS)
    said = sh(sandbox, "echo bwrap: nothing >&2; ls /proc/self/fd; exit 1")
    assert said.text() == "bwrap: nothing\n0\n1\n2\n3\n" and said.exit_code == 1, "nor can a command say so itself"
    assert sh(sandbox, "kill -9 $$").exit_code == 137
    sandbox.close()


def test_output_is_cut_in_the_middle() -> None:
    capped = CappedOutput(10)
    for piece in (b"abc", b"defgh", b"", b"ijklmnop", b"qrstuvwxyz"):
        capped.add(piece)
    assert capped.content() == b"abcdevwxyz" and capped.left_out == 16
    assert capped.marked() == b"abcde\n[... 16 bytes left out ...]\nvwxyz"


def test_slots_are_used_again_and_waited_for(template: Path) -> None:
    backend = BubblewrapBackend(slots=1, threads=2)
    first = backend.open(Template(template), LIMITS)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(backend.open, Template(template), LIMITS)
        time.sleep(0.05)
        assert not second.done()
        first.close()
        assert sh(second.result(60), "cat a.txt").text() == "original\n"
    backend.close()
    with pytest.raises(SandboxError, match="closed"):
        backend.open(Template(template), LIMITS)


def test_the_watchdog_where_there_are_no_control_groups(template: Path) -> None:
    backend = BubblewrapBackend(slots=1, threads=1, control_groups=False)
    assert isinstance(backend.tree(0), Watchdog)
    sandbox = backend.open(Template(template), Limits(timeout_s=60, memory_bytes=200 << 20))
    assert python(sandbox, "x = bytearray(100 << 20); print(len(x))").ok

    tree = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        os.setsid(); x = bytearray(100 << 20); time.sleep(600); os._exit(0)
time.sleep(600)
"""
    result = python(sandbox, tree)
    assert result.out_of_memory and not result.timed_out and result.exit_code == 137
    assert python(sandbox, "print(1)").ok and not backend.tree(0).processes()
    backend.close()


def test_sandboxes_end_with_their_process(template: Path) -> None:
    """Killed without a chance to clean up: no process and no mount stays."""
    code = f"""
import sys, threading
from pathlib import Path
from envs.sandbox import Command, Limits, Template
from envs.sandbox.bubblewrap import BubblewrapBackend
backend = BubblewrapBackend(slots=1, threads=1)
sandbox = backend.open(Template(Path({str(template)!r})), Limits(timeout_s=100))
thread = threading.Thread(target=lambda: sandbox.run(Command(["sh", "-c", "setsid sleep 98 & sleep 99"])))
thread.start()
import time
while len(backend.tree(0).processes()) < 5: time.sleep(0.01)
print(backend.uid(0), flush=True)
thread.join()
"""

    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        uid = int(process.stdout.readline())
        assert Watchdog(uid).processes()
        process.kill()

    deadline = time.monotonic() + 60
    while Watchdog(uid).processes():
        assert time.monotonic() < deadline, "processes survived"
        time.sleep(0.01)
    assert str(STATE) not in Path("/proc/self/mountinfo").read_text()


def test_mounts_are_invisible_to_the_host(backend: BubblewrapBackend, template: Path) -> None:
    sandbox = backend.open(Template(template), LIMITS)
    assert str(STATE) not in Path("/proc/self/mountinfo").read_text()
    assert not list(STATE.iterdir())
    sandbox.close()


def test_a_template_must_be_a_folder(backend: BubblewrapBackend, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="is no folder"):
        backend.open(Template(tmp_path / "nothing"), LIMITS)
    with pytest.raises(SandboxError, match="needs the docker backend"):
        backend.open(Template(image="swebench/x"), LIMITS)
    odd = world_writable(tmp_path / "a:b,c=d\\e")
    (odd / "f").write_text("f")
    sandbox = backend.open(Template(odd), LIMITS)
    assert sh(sandbox, "cat f").text() == "f"
    sandbox.close()


def test_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "running_engine", lambda: None)
    assert detect.missing_for_bubblewrap() == ""
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SandboxError) as error:
        detect.make_backend()
    message = str(error.value)
    assert "no bwrap" in message and "apt-get install bubblewrap" in message and "\n" not in message
    with pytest.raises(SandboxError, match="sandbox=docker: start a Docker or Podman engine"):
        detect.make_backend("docker")


DOCKER_LIMITS = """
--network none
--cap-drop ALL
no-new-privileges
--memory 7 --memory-swap 7
fsize=11
--pids-limit 9
--workdir /testbed
--entrypoint sleep img infinity
"""


def test_docker_commands_carry_every_limit() -> None:
    limits = Limits(memory_bytes=7, processes=9, file_bytes=11)
    template = Template(image="img", workspace="/testbed")
    created = " ".join(create_command("docker", "n", template, limits))
    for part in DOCKER_LIMITS.strip().splitlines():
        assert part in created

    command = Command(["ls", "-l"], environment={"A": "b"})
    expected = "podman exec --interactive --workdir /testbed --env A=b n timeout --signal=KILL 2.500 ls -l"
    assert exec_command("podman", "n", template, command, 2.5) == expected.split()


@pytest.mark.skipif(running_engine() is None, reason="no Docker or Podman engine runs here")
def test_docker_backend_runs(template: Path) -> None:
    backend = DockerBackend()
    sandbox = backend.open(Template(template), LIMITS)
    assert sh(sandbox, "cat a.txt; echo x > b.txt").text() == "original\n"
    assert sandbox.run(Command(["sh", "-c", "setsid sleep 97 & sleep 99"], timeout_s=1)).timed_out
    assert sh(sandbox, "cat b.txt").text() == "x\n"
    backend.close()


def test_processes_and_threads_that_end_meanwhile_do_not_disturb_the_reaping() -> None:
    """A file of /proc whose task ends while it is read gives ESRCH, and ENOENT before it is opened."""
    ended = threading.Event()

    def start_and_end() -> None:
        while not ended.is_set():
            threading.Thread(target=subprocess.run, args=(["true"],)).start()
            time.sleep(0.001)

    starter = threading.Thread(target=start_and_end)
    starter.start()
    try:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            syscalls.reap_orphans(uid=1_999_999)
    finally:
        ended.set()
        starter.join()


def test_who_adopts_orphans_goes_on_when_a_backend_closes() -> None:
    """A supervisor counts on it: copies of its fork server are its children by that alone."""
    is_one = ctypes.c_int()
    adopt_orphans()
    BubblewrapBackend(slots=1, threads=1).close()
    assert ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_one), 0, 0, 0) == 0
    assert is_one.value == 1
