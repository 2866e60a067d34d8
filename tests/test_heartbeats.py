"""A heartbeat is looked at by itself: what it costs does not grow with the number of generators."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

from launch.children import Child
from launch.launcher.protocol import Handle
from launch.plan import ProcessSpec
from launch.supervisor import Supervisor
from rl.observe.trace_events import Wait
from rl.weights.updater import UpdaterCore
from rl.wire.messages import Heartbeat, Version, WeightStatus
from rollout.proxy.core import ProxyCore
from tests.conftest import MakeRun

FEW, MANY = 16, 1024
TIMES = 3.0  # a tree over 64 times as many is less than twice as high


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of Python it executes; each turn of a loop counts."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def updater(generators: int) -> Callable[[int], object]:
    """All serve version 0, half of them have been told version 1, one after another."""
    core = UpdaterCore(generators=generators, rolling=True, tolerance=1e-3, probe=False)
    core.publish(0.0, Version(0, 0), None, [], [])
    for index in range(generators):
        core.status(0.0, WeightStatus(index, 0, Version(-1, -1)))
    for index in range(generators):
        core.status(0.0, WeightStatus(index, 0, Version(0, 0)))
    core.publish(1.0, Version(0, 1), None, [], [])
    return lambda index: core.status(1.0, WeightStatus(index, 0, Version(0, 0), loading=True))


def proxy(generators: int) -> Callable[[int], object]:
    core = ProxyCore()
    for index in range(generators):
        core.generator_up(0.0, index, 0, 100_000, 8, 1000)
    for request in range(generators):
        core.add(0.0, "client", request, session=request, kind="train", prompt_len=10, max_tokens=100)
    keys = {next(iter(each.live)): index for index, each in core._generators.items() if each.live}
    running = {index: key for key, index in keys.items()}
    return lambda index: core.status(1.0, index, 0, {running[index]: 5}, 1)


def supervisor(generators: int, make_run: MakeRun) -> Callable[[int], object]:
    run = make_run("tracking.wandb=disabled", f"generator.count={generators}")
    made = Supervisor(run, [])
    beats = [Heartbeat("generator", index, 0, 1, True, longest=Wait(1.0, "proxy")) for index in range(generators)]
    for index, beat in enumerate(beats):
        name = run.names.of("generator", index)
        spec = ProcessSpec("generator", index, "no.module")
        child = Child(spec, 0, cast(Handle, None), Path("none"), 0.0, beat, identity=name, registered=True)
        made._children["generator", index] = child
    made._socket.close(linger=0)
    return lambda index: made._handle(beats[index], run.names.of("generator", index))


@pytest.mark.parametrize("kind", ["updater", "proxy", "supervisor"])
def test_a_heartbeat_costs_the_same_among_many_generators(kind: str, make_run: MakeRun) -> None:
    def cost(generators: int) -> Sequence[int]:
        made: dict[str, Callable[[int], Callable[[int], object]]]
        made = {"updater": updater, "proxy": proxy, "supervisor": partial(supervisor, make_run=make_run)}
        beat = made[kind](generators)
        beat(1)  # what it does but once is done
        return [lines_of(partial(beat, index)) for index in (0, 1, generators // 2, generators - 1)]

    few, many = cost(FEW), cost(MANY)
    assert min(few) > 3
    assert max(many) < TIMES * max(few)


def test_a_scan_would_be_noticed() -> None:
    assert lines_of(lambda: [index for index in range(MANY) if index]) > MANY
