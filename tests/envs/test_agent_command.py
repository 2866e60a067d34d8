"""Agents that are programs: what they are given, what they answer, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from envs.gateway.command import Command, CommandFailed
from rollout.episodes.environment import Endpoint, Outcome
from tests.envs.left_over import left_over, nothing_is_left, running

ENDPOINT = Endpoint("http://127.0.0.1:49009/s/5", "secret")
GOOD = """
import json, os, sys
task = json.load(sys.stdin)
assert os.environ["OPENAI_BASE_URL"] == "http://127.0.0.1:49009/s/5/v1" and os.environ["OPENAI_API_KEY"] == "secret"
assert os.environ["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:49009/s/5" and "secret" == os.environ["ANTHROPIC_API_KEY"]
assert os.listdir() == [] and os.getcwd() == os.environ["HOME"]
open("left", "w").write("x")
print("it thinks aloud")
print(json.dumps({"reward": task["worth"], "success": True, "rewards": {"resp-1": 0.5}, "info": {"n": 2}}))
"""
SLEEP = f"import time; time.sleep(600)  # of test process {os.getpid()}"
# A grandchild in a session of its own, which outlives plain kills of the process group.
ESCAPE = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print('{{"reward": 0, "success": false}}', flush=True)
"""


def run(program: str, deadline_s: float = 120.0, **limits: Any) -> Outcome:
    command = Command([sys.executable, "-c", program], deadline_s=deadline_s, **limits)
    return asyncio.run(command.run({"worth": 0.75}, ENDPOINT))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize("sandbox", [True, False])
def test_a_program_gets_its_task_and_its_endpoint_and_answers(tmp_path: Path, sandbox: bool) -> None:
    assert run(GOOD, sandbox=sandbox) == Outcome(0.75, True, {"resp-1": 0.5}, {"n": 2})
    assert not left_over(SLEEP, tmp_path)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise SystemExit('I broke')", "status 1: I broke"),
        ("print('done')", "no outcome: 'done'"),
        ("print('{\"reward\": 1}')", "no outcome"),
        ('print(\'{"reward": 1, "success": true, "bonus": 5}\')', "no outcome"),
        ("pass", "no outcome: ''"),
        ("open('big', 'wb').write(bytes(3 << 20))", "status"),
    ],
)
def test_a_program_that_answers_nothing_fails(tmp_path: Path, program: str, why: str) -> None:
    with pytest.raises(CommandFailed, match=why):
        run(program, memory_bytes=1 << 30, file_bytes=1 << 20)
    assert not left_over(SLEEP, tmp_path)


def test_memory_is_limited(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"took more than 209715200 bytes"):
        run("x = b'x' * (1 << 30)", memory_bytes=200 << 20, disk_bytes=1 << 20)
    with pytest.raises(CommandFailed, match="MemoryError"):
        run("x = bytearray(3 << 30)", memory_bytes=1 << 30, sandbox=False)
    assert not left_over(SLEEP, tmp_path)


def test_a_flood_of_output_is_cut_and_the_outcome_is_kept(tmp_path: Path) -> None:
    flood = "print('x' * 100, sep='') or [print('y' * 1000) for _ in range(5000)]"
    assert run(flood + '; print(\'{"reward": 1, "success": true}\')', output_bytes=4096) == Outcome(1, True)


@pytest.mark.parametrize("sandbox", [True, False])
def test_what_a_program_starts_ends_with_it(tmp_path: Path, sandbox: bool) -> None:
    assert run(ESCAPE, sandbox=sandbox) == Outcome(0, False)
    assert nothing_is_left(SLEEP, tmp_path)

    with pytest.raises(CommandFailed, match="deadline of 3 s"):
        run(ESCAPE + SLEEP, deadline_s=3.0, sandbox=sandbox)
    assert nothing_is_left(SLEEP, tmp_path)


@pytest.mark.parametrize("sandbox", [True, False])
def test_a_cancel_kills_the_program(tmp_path: Path, sandbox: bool) -> None:
    async def scene() -> None:
        command = Command([sys.executable, "-c", ESCAPE + SLEEP], sandbox=sandbox)
        task = asyncio.create_task(command.run({}, ENDPOINT))
        while not running(SLEEP):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(scene(), 240))
    assert nothing_is_left(SLEEP, tmp_path)


@pytest.mark.parametrize("sandbox", [True, False])
def test_a_cancel_at_any_moment_leaves_no_folder(tmp_path: Path, sandbox: bool) -> None:
    async def scene(turns: int) -> None:
        task = asyncio.create_task(Command([sys.executable, "-c", SLEEP], sandbox=sandbox).run({}, ENDPOINT))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for turns in range(12):
        asyncio.run(asyncio.wait_for(scene(turns), 240))
        assert nothing_is_left(SLEEP, tmp_path), turns
