"""Hostile programs in the sandbox of an agent: the gateway is all that they reach, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from envs.gateway.command import Command, CommandFailed
from rollout.episodes.environment import Endpoint, Outcome
from rollout.episodes.tokenizer import ChatTokenizer
from tests.envs.left_over import nothing_is_left, running
from tests.envs.test_gateway import Rig, chat, run  # noqa: F401

PYTHON = sys.executable
SAY = "\nprint(json.dumps({'reward': 0, 'success': False, 'info': found}))"
HEAD = "import json, os, pathlib, socket, sys, subprocess, time, urllib.error, urllib.request\nfound = {}\n"
ABSTRACT = f"fresco-test-abstract-{os.getpid()}"
SLEEP_S = f"600.{os.getpid()}"  # which no other test run's programs have in their command
NOWHERE = Endpoint("http://127.0.0.1:49009/s/5", "secret")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def play(program: str, endpoint: Endpoint = NOWHERE, **limits: Any) -> Outcome:
    return asyncio.run(Command([PYTHON, "-c", HEAD + program + SAY], **limits).run({}, endpoint))


ASK = """
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
def ask(url, key):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "add"}]}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, {"Authorization": "Bearer " + key})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code
found["own"] = ask(base, key) == "it is 3"
found["other"] = ask(base.replace("/s/5/", "/s/6/"), key)
found["guessed"] = ask(base, "guessed")
"""


def test_it_reaches_its_own_ticket_and_no_other(chat: ChatTokenizer) -> None:  # noqa: F811
    async def scene(rig: Rig) -> None:
        rig.says = ["it is 3"]
        outcome = await Command([PYTHON, "-c", HEAD + ASK + SAY]).run({}, rig.endpoint)
        assert outcome.info == {"own": True, "other": 401, "guessed": 401} and len(rig.asked) == 1

    run(chat, scene)


ELSEWHERE = """
def reaches(family, address):
    with socket.socket(family) as tried:
        tried.settimeout(2)
        try:
            tried.connect(address)
            return True
        except OSError:
            return False
found["host"] = reaches(socket.AF_INET, ("127.0.0.1", PORT))
found["outside"] = reaches(socket.AF_INET, ("10.0.0.1", 80)) or reaches(socket.AF_INET, ("8.8.8.8", 53))
found["abstract"] = reaches(socket.AF_UNIX, "\\0ABSTRACT")
"""


def test_it_reaches_nothing_else_of_the_network() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{ABSTRACT}")
        abstract.listen()
        outcome = play(ELSEWHERE.replace("PORT", str(server.getsockname()[1])).replace("ABSTRACT", ABSTRACT))
    assert not any(outcome.info.values()), outcome.info


FILES = """
def readable(path):
    try:
        return bool(os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1))
    except OSError:
        return False
found["secret"] = readable("SECRET")
found["others"] = any("SECRET" in str(path) for path in pathlib.Path("/").glob("tmp/**/*"))
found["home"] = any(map(readable, ("/root/.ssh", "/root/.cache", "/root/.bash_history", "/etc/shadow")))
found["processes"] = len([name for name in os.listdir("/proc") if name.isdigit()])
found["venv"] = readable(sys.prefix)
try:
    pathlib.Path(sys.prefix, "planted").write_text("x")
    found["planted"] = True
except OSError:
    found["planted"] = False
try:
    pathlib.Path("/run/planted").write_text("x")
    found["run"] = True
except OSError:
    found["run"] = False
pathlib.Path("mine").write_text("x")
"""


def test_it_sees_its_folder_and_its_environment_and_changes_the_first_only(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of another ticket")
    found = dict(play(FILES.replace("SECRET", str(secret))).info)
    assert found.pop("processes") < 8 and found.pop("venv")
    assert not any(found.values()), found
    assert not (Path(sys.prefix) / "planted").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["secret"], "its folder is gone, with what it wrote"


DAEMON = """
program = "import time; time.sleep(SLEEP_S)"
for _ in range(5):
    subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
while sum(b"SLEEP_S" in pathlib.Path("/proc", name, "cmdline").read_bytes() for name in os.listdir("/proc")
          if name.isdigit() and int(name) != os.getpid()) < 5:
    time.sleep(0.01)
if STAY:
    time.sleep(SLEEP_S)
""".replace("SLEEP_S", SLEEP_S)


def test_daemons_end_with_it(tmp_path: Path) -> None:
    assert play(DAEMON.replace("STAY", "False")) == Outcome(0, False)
    assert nothing_is_left(SLEEP_S, tmp_path)

    with pytest.raises(CommandFailed, match="deadline of 5 s"):
        play(DAEMON.replace("STAY", "True"), deadline_s=5)
    assert nothing_is_left(SLEEP_S, tmp_path)


BOMB = """
try:
    while True:
        if os.fork() == 0:
            time.sleep(SLEEP_S)
except OSError:
    found["refused"] = True
""".replace("SLEEP_S", SLEEP_S)


def test_a_fork_bomb_stays_within_its_processes(tmp_path: Path) -> None:
    assert play(BOMB, processes=24) == Outcome(0, False, info={"refused": True})
    assert nothing_is_left(SLEEP_S, tmp_path)


FILL = """
written = 0
try:
    for number in range(100):
        with open(f"fill-{number}", "wb", buffering=0) as file:
            for _ in range(16):
                written += file.write(bytes(1 << 20))
except OSError:
    pass
found["mebibytes"] = written >> 20
"""


def test_a_full_disk_is_its_own(tmp_path: Path) -> None:
    found = play(FILL, disk_bytes=64 << 20).info["mebibytes"]
    assert 32 < found <= 64 and not list(tmp_path.glob("fresco-*"))


def test_a_cancelled_program_that_hides_leaves_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        program = HEAD + DAEMON.replace("STAY", "True")
        task = asyncio.create_task(Command([PYTHON, "-c", program]).run({}, NOWHERE))
        while len(running(SLEEP_S)) < 6:
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(scene(), 60))
    assert nothing_is_left(SLEEP_S, tmp_path)
