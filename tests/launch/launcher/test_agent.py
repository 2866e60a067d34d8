"""An agent as a real process, which lacks the files that its processes begin with."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch.commands.join import _keep
from launch.launcher.node_messages import CHUNK_BYTES
from launch.supervisor import Supervisor
from rl.store.checkpoint_folder import Meta, begin, commit
from rl.store.made_once import cache_folder
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.launch.launcher.test_cluster import Head
from tests.launch.test_supervisor import QUIET, FakeSpec

pytestmark = pytest.mark.slow

LEASE_S = 10.0
PATIENCE_S = 60.0
PARTS = 10
LARGE = b"x" * (PARTS * CHUNK_BYTES - 1)
AGENT = """
import os, time
from launch import agent

def slow_digest(path):
    if path.name.startswith(".__0_0.distcp"):  # what has come of it
        time.sleep({digest_s})
    return digest(path)

def slow_take(files, part):
    time.sleep({part_s})
    return take(files, part)

def slow_close(fetcher):
    time.sleep({close_s})
    close(fetcher)

digest, agent.file_digest = agent.file_digest, slow_digest
take, agent.Files.take = agent.Files.take, slow_take
close, agent.Fetcher.close = agent.Fetcher.close, slow_close
agent._looks_like = lambda *_: False  # the head's files are not seen here
agent.main()
"""


@pytest.fixture
def run(make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    """It begins from a checkpoint of several parts."""
    monkeypatch.setenv("FRESCO_CACHE", str(tmp_path / "cache"))
    state = begin(tmp_path / "before", 4) / "state"
    state.mkdir()
    (state / "__0_0.distcp").write_bytes(LARGE)
    checkpoint = commit(tmp_path / "before", Meta(4, 0, 1), b"journal", keep=1)
    run = make_run(*QUIET, "cluster.nodes=1", "network.transport=tcp", f"cluster.lease_s={LEASE_S:g}")
    run.config.resume = checkpoint
    return run


@contextlib.contextmanager
def agent_of(
    head: Head, folder: Path, part_s: float = 0.0, close_s: float = 0.0
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """An agent, and what its keeper hears of its lease.

    part_s: how long each part of a file takes to come. close_s: how long the disk needs for what it was about to drop.
    """
    reads, lease = os.pipe()
    folder.mkdir()

    program = AGENT.format(digest_s=2 * LEASE_S, part_s=part_s, close_s=close_s)
    words = [sys.executable, "-c", program, head.launcher.address, str(lease)]
    process = subprocess.Popen([*words, str(folder), "0"], bufsize=0, stdin=subprocess.PIPE, pass_fds=[lease])
    os.close(lease)
    head.launcher._local._others.add(psutil.Process(process.pid))  # it is no child of a head elsewhere

    try:
        assert process.stdin is not None
        process.stdin.write(head.key)
        yield process, reads
        assert process.wait(PATIENCE_S) == 0, "it ends with the run"
    finally:
        process.kill()
        process.wait()
        os.close(reads)


def test_a_lease_goes_on_while_a_large_file_of_a_checkpoint_is_compared_with_its_digest(
    run: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    head = Head(run, monkeypatch)
    with agent_of(head, tmp_path / "agent") as (agent, _):
        rank = head.start("learner.0.0")
        assert rank.wait(PATIENCE_S) == 1, "it has begun, and there is no such module"
        assert agent.poll() is None

        (arrived,) = cache_folder().rglob("__0_0.distcp")
        assert arrived.read_bytes() == LARGE
        head.launcher.close()

    told = [line for line in capfd.readouterr().out.splitlines() if "fetching" in line]
    assert len(told) == 1 and told[0].startswith("fetching resume/state/__0_0.distcp, "), "small files are not told"


def test_what_a_rank_begins_with_may_take_longer_to_come_than_its_start(
    run: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_s = 2.5
    run.config.timeouts.start_s = 0.75 * part_s * PARTS
    run = run.model_copy(update={"socket_folder": run.folder / "ipc"})
    run.socket_folder.mkdir()
    plan = [FakeSpec(role, 0, environment={f"FAKE_{role.upper()}": "done"}) for role in ("broker", "learner")]
    head = Head(run, monkeypatch)
    with agent_of(head, tmp_path / "agent", part_s):
        head.thread.join(PATIENCE_S)
        assert Supervisor(run, [*plan], head.launcher).execute() == 0


def test_at_the_end_a_keeper_waits_for_what_its_agent_drops(
    run: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of checkpoints may have hundreds of gigabytes. An agent that is killed instead leaves them for ever, and
    its machine says that it has lost the head."""
    run.config.cluster.lease_s = 2.0
    head = Head(run, monkeypatch)
    with agent_of(head, tmp_path / "agent", close_s=2 * run.config.cluster.lease_s) as (_, lease):
        head.thread.join(PATIENCE_S)
        head.launcher.close()
        assert _keep(lease), "the agent ends by itself"
