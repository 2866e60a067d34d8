"""Who was stopped for a while does not hold it against others."""

from __future__ import annotations

import asyncio
import time

import pytest

from rl.wire.awake import Awake, AwakeLoop


def test_it_counts_what_its_loop_was_awake() -> None:
    awake = Awake(100.0, turn_s=0.5)
    assert [awake.read(now) for now in (100.0, 100.5, 101.4, 121.4, 121.5)] == pytest.approx(
        [100.0, 100.5, 101.4, 102.4, 102.5]
    )


def test_the_timeout_of_a_process_that_was_stopped_is_not_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps by a minute between two turns of the loop, as it does when the machine was paused."""
    jumped_s = 0.0
    read = time.monotonic
    monkeypatch.setattr("rl.wire.awake.time.monotonic", lambda: read() + jumped_s)

    async def answer() -> str:
        nonlocal jumped_s
        jumped_s = 60.0
        await asyncio.sleep(0.2)
        return "in time"

    async def ask() -> str:
        return await asyncio.wait_for(answer(), 5.0)

    assert AwakeLoop(0.5).run_until_complete(ask()) == "in time"


def test_its_timers_end_on_time_in_a_loop_that_has_nothing_else_to_do() -> None:
    begin = time.monotonic()
    AwakeLoop(0.05).run_until_complete(asyncio.sleep(0.5))
    assert 0.5 <= time.monotonic() - begin < 5
