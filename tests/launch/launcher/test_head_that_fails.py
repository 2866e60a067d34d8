"""What stops the thread in which a head talks with its machines ends the run, and says why; a log does not stop it."""

from __future__ import annotations

import errno
import os
import resource
import threading
from pathlib import Path

import pytest

from launch.launcher.head_file import Line, Machine
from launch.launcher.node_messages import Beat, Hello, code_hash
from launch.launcher.protocol import Spec
from launch.launcher.remote import RemoteHandle
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.launch.launcher.test_cluster import PATIENCE_S, FakeAgent, Head


@pytest.fixture
def run(make_run: MakeRun) -> RunFile:
    return make_run("cluster.nodes=1", "network.transport=tcp", "cluster.lease_s=3", "timeouts.start_s=60")


def test_a_head_that_talks_with_no_machine_any_more_ends_all_that_runs_there(
    run: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = Head(run, monkeypatch)
    agent = FakeAgent(head.launcher, head.key)
    agent.join()
    handle = head.start("generator.0.0")
    agent.beat(generator_0_0=None)

    def write(line: Line) -> None:
        if isinstance(line, Machine):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(head.launcher._file, "write", write)
    FakeAgent(head.launcher, head.key, b"agent.2").say(Hello(0, [], code_hash()))
    assert handle.wait(PATIENCE_S) == -9
    assert handle.why.startswith("the head talks with no machine any more: OSError: ")  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="No space left on device"):
        head.start("generator.0.1")
    head.launcher.close()


def test_what_was_not_copied_when_the_talk_ended_is_told_with_the_cause(
    run: RunFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head = Head(run, monkeypatch)
    agent = FakeAgent(head.launcher, head.key)
    agent.sees = False
    agent.join()
    head.start("learner.0.0")
    agent.made = {"model": "its digest"}
    agent.beat(learner_0_0=None)

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(head.launcher._copying, "turn", fail)
    head.launcher._thread.join(PATIENCE_S)
    head.launcher.close()
    told = capsys.readouterr().out
    assert "! model was not copied: OSError: [Errno 28] No space left on device" in told


def test_a_part_of_a_log_for_which_a_disk_had_room_stands_in_it_once(tmp_path: Path) -> None:
    handle = RemoteHandle(Spec("generator.0.0", "", (), {}, tmp_path / "log"), threading.RLock(), lambda: None)
    handle.read(0, b"first, ")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        for _ in range(3):
            handle.read(7, b"second")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert handle.log_bytes == 10, "from there on it is told again"
    handle.read(10, b"ond")
    handle.read(20, b"last")
    assert handle.spec.log.read_bytes() == b"first, second\n(7 bytes stand on its machine)\nlast"
    assert handle.log_bytes == 24


def test_what_a_log_cannot_take_is_told_again(run: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    head = Head(run, monkeypatch)
    agent = FakeAgent(head.launcher, head.key)
    agent.join()
    handle = head.start("generator.0.0")
    log = run.folder / "generator.0.0.log"
    log.mkdir()  # in its place, so that it cannot be written

    for told, known in ((b"first", 0), (b"first", 5)):
        agent.beats += 1
        agent.say(Beat(agent.beats, {"generator.0.0": None}, {"generator.0.0": (0, told)}, True))
        assert agent.beat(generator_0_0=None).held == {"generator.0.0": known}
        if log.is_dir():
            log.rmdir()

    assert log.read_bytes() == b"first" and handle.poll() is None
    head.launcher._members.by_agent.clear()
    head.launcher.close()
