"""What the supervisor knows of a process that it had started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from launch.children import Child
from launch.plan import ProcessSpec
from rl.wire.messages import Heartbeat


def test_the_time_to_start_counts_from_when_something_came_last_that_it_needs() -> None:
    handle: Any = SimpleNamespace(came=0.0)
    silent = Heartbeat("learner", 0, 0, progress=-1, busy=False)
    child = Child(ProcessSpec("learner", 0, "a.module"), 0, handle, Path("log"), 100.0, silent)
    assert not child.comes_nearer(110.0) and child.started == 100
    for now in (120.0, 300.0):
        handle.came += 1
        assert child.comes_nearer(now)
    assert not child.comes_nearer(480.0), "nothing more comes, or it has begun"
    assert child.started == 300


def test_of_other_launchers_it_counts_from_the_start() -> None:
    silent = Heartbeat("learner", 0, 0, progress=-1, busy=False)
    local: Any = SimpleNamespace()
    child = Child(ProcessSpec("learner", 0, "a.module"), 0, local, Path("log"), 100.0, silent)
    assert not child.comes_nearer(280.0) and child.started == 100
