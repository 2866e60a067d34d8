"""Attempts to use up the host, or to outlive a command: each must be contained, and leaves a healthy server behind."""

from __future__ import annotations

import threading
import time

from envs.sandbox import Command, Sandbox, read_file
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.memory import ControlGroup
from tests.envs.sandboxes import LIMITS, python, sh


def test_fork_bomb(sandbox: Sandbox) -> None:
    result = sh(sandbox, "bomb() { bomb | bomb & }; bomb; sleep 300", timeout_s=1)
    assert result.seconds < LIMITS.timeout_s


def test_fork_bomb_without_a_pause(backend: BubblewrapBackend, sandbox: Sandbox) -> None:
    most = 0
    code = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    thread = threading.Thread(target=lambda: python(sandbox, code, timeout_s=1))
    thread.start()
    while thread.is_alive():
        most = max(most, len(backend.tree(0).processes()))
        time.sleep(0.02)
    assert most <= LIMITS.processes + 1


def test_thread_bomb(sandbox: Sandbox) -> None:
    code = """
import threading, time
for n in range(10000):
    threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
"""
    result = python(sandbox, code)
    assert not result.ok and "can't start new thread" in result.text()


def test_memory_bomb(sandbox: Sandbox) -> None:
    result = python(sandbox, "x = []\nwhile True: x.append(bytearray(1 << 24))")
    assert result.out_of_memory and not result.timed_out


def test_memory_bomb_of_a_tree(backend: BubblewrapBackend, sandbox: Sandbox) -> None:
    code = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        os.setsid(); x = bytearray(60 << 20); time.sleep(600); os._exit(0)
time.sleep(600)
"""
    assert python(sandbox, code, timeout_s=10).out_of_memory  # who began them sleeps on


def test_memory_in_anonymous_files(backend: BubblewrapBackend, sandbox: Sandbox) -> None:
    assert isinstance(backend.tree(0), ControlGroup), "needs a memory controller"
    code = """
import os
files = []
for n in range(200):
    fd = os.memfd_create(str(n)); os.write(fd, bytes(7 << 20)); files.append(fd)
print("kept", len(files))
"""
    result = python(sandbox, code)
    assert result.out_of_memory and "kept" not in result.text()


def test_disk_fill(sandbox: Sandbox) -> None:
    for folder in ("/tmp", "/workspace", "/home/agent", "/dev/shm"):
        sh(sandbox, f"for n in 1 2 3 4 5 6 7 8 9; do head -c 8000000 /dev/zero > {folder}/fill$n; done")
        used = sh(sandbox, "du -sck /tmp /workspace /home/agent /dev/shm | tail -1 | cut -f1").text()
        assert int(used) <= 33 << 10
        sh(sandbox, f"rm -f {folder}/fill*")
        size = sh(sandbox, f"df -k --output=size {folder} | tail -1").text()
        assert int(size) <= 33 << 10, "not the machine's disk"


def test_disk_fill_with_one_file(sandbox: Sandbox) -> None:
    sh(sandbox, "head -c 100000000 /dev/zero > big")
    assert int(sh(sandbox, "stat -c %s big").text()) <= LIMITS.file_bytes
    assert not sh(sandbox, "truncate -s 1T sparse").ok


def test_disk_fill_with_inodes(sandbox: Sandbox) -> None:
    code = "import os\nfor n in range(10**6): os.close(os.open(f'/tmp/{n}', os.O_CREAT))"
    result = python(sandbox, code)
    assert not result.ok and "No space left" in result.text()
    assert not sh(sandbox, "cd /tmp && find . -delete").timed_out


def test_output_flood(sandbox: Sandbox) -> None:
    result = sh(sandbox, "yes", timeout_s=1)
    assert result.timed_out and len(result.output) < LIMITS.output_bytes + 100
    result = sh(sandbox, "yes | head -c 10000000")
    assert result.ok and len(result.output) < LIMITS.output_bytes + 100 and result.left_out_bytes > 1 << 20
    flood = ["sh", "-c", "yes >&2 & head -c 100000000 /dev/zero"]
    both = sandbox.run(Command(flood, timeout_s=3, separate_stderr=True))
    assert len(both.output) + len(both.stderr) < 2 * LIMITS.output_bytes + 200


def test_time_out_kills_the_whole_tree(backend: BubblewrapBackend, sandbox: Sandbox) -> None:
    script = "trap '' TERM INT HUP; setsid sh -c 'trap \"\" TERM; sleep 601 & sleep 602' & nohup sleep 603 & sleep 604"
    result = sh(sandbox, script, timeout_s=0.5)
    assert result.timed_out and result.exit_code == 137 and result.seconds < LIMITS.timeout_s
    assert not backend.tree(0).processes()


def test_survivors_setsid_and_double_fork(backend: BubblewrapBackend, sandbox: Sandbox) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in (0, 1, 2): os.close(fd)
        time.sleep(1); open("/workspace/survived", "w").write("x"); time.sleep(60)
    os._exit(0)
"""

    assert python(sandbox, code).ok
    assert not backend.tree(0).processes()
    time.sleep(1.2)
    assert read_file(sandbox, "survived") is None


def test_survivors_that_hold_the_pipe(sandbox: Sandbox) -> None:
    result = sh(sandbox, "(setsid sleep 600) & echo done")
    assert result.ok and result.text() == "done\n" and result.seconds < LIMITS.timeout_s


def test_stopped_process(sandbox: Sandbox) -> None:
    result = sh(sandbox, "kill -STOP $$; echo never", timeout_s=0.5)
    assert result.timed_out and b"never" not in result.output
