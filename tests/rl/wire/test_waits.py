"""The longest wait is one: turns of a loop that wait for the same are one wait until something comes."""

from __future__ import annotations

import pytest

from launch.summary import Observed
from rl.observe.trace_events import Wait
from rl.wire.process import Waits


def test_turns_make_one_wait_until_something_comes() -> None:
    waits = Waits()
    waits.add("generators", 60.0)  # they start
    waits.ended()
    for _ in range(3):
        waits.add("broker", 2.0)
    waits.ended()
    for _ in range(40):
        waits.add("proxy", 1.0)
        waits.ended()
    waits.add("broker", 4.0)

    assert waits.seconds == {"generators": 60.0, "broker": 10.0, "proxy": 40.0}
    assert waits.longest == Wait(6.0, "broker", -1)


@pytest.mark.parametrize("other", [("proxy", -1), ("broker", 8)], ids=["for another", "in another step"])
def test_a_wait_for_something_else_is_another_one(other: tuple[str, int]) -> None:
    waits = Waits()
    waits.ended()
    waits.add("broker", 2.0, 7)
    waits.add(other[0], 2.5, other[1])
    waits.add("broker", 2.0, 7)
    assert waits.longest == Wait(2.5, *other)


def test_the_longest_wait_of_a_run_outlives_its_process() -> None:
    observed = Observed(started_at=0.0, step=11)
    observed.waited("learner.0", Wait(3.0, "broker", 5))
    observed.waited("proxy.0", Wait(9.0, "generators"))
    observed.step = 20
    for name in ("learner.0", "proxy.0"):
        observed.waited(name, Wait(1.0, "anybody", 1))  # its next incarnation, which has waited less

    assert observed.longest_wait() == ("proxy.0", Wait(9.0, "generators", 12))
    assert observed.longest_wait("learner") == ("learner.0", Wait(3.0, "broker", 5))
