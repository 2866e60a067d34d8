"""A start that advances is seen to advance, and one that stands still is not."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rl.wire.effort import Effort, watched_start

DEADLINE_S = 60
BUSY = "while True: pass"
READS = """
import time
while True:
    open("/dev/zero", "rb").read(1 << 22)
    time.sleep(0.001)
"""


def until_it_advances(effort: Effort) -> None:
    until = time.monotonic() + DEADLINE_S
    while not effort.advanced():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("script", [BUSY, READS])
def test_what_works_below_this_process_advances_until_it_is_stopped(script: str) -> None:
    with subprocess.Popen([sys.executable, "-c", script]) as child:
        try:
            effort = Effort()
            for _ in range(3):
                until_it_advances(effort)

            process = psutil.Process(child.pid)
            process.suspend()
            while process.status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            effort.advanced()  # the last of it
            assert [effort.advanced() for _ in range(5)] == [False] * 5
        finally:
            child.kill()


def test_a_kernel_that_counts_no_bytes_counts_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil has no `io_counters` there. Nothing else would advance a start, which would be ended as hung."""
    monkeypatch.delattr(psutil.Process, "io_counters")
    with subprocess.Popen([sys.executable, "-c", BUSY]) as child:
        try:
            effort = Effort()
            for _ in range(3):
                until_it_advances(effort)
        finally:
            child.kill()


def test_a_start_counts_below_zero_and_leaves_nothing_of_it() -> None:
    """So that a failure in it is one of a process that has not worked yet."""
    process: Any = SimpleNamespace(
        progress=0, busy=False, config=SimpleNamespace(timeouts=SimpleNamespace(heartbeat_s=0.01))
    )
    with watched_start(process):
        assert process.busy
        until = time.monotonic() + DEADLINE_S
        while process.progress > -3:  # the processor is used
            assert time.monotonic() < until
    assert not process.busy and process.progress == 0

    with pytest.raises(RuntimeError), watched_start(process):
        raise RuntimeError
    assert not process.busy and process.progress == 0
