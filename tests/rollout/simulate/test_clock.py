"""Virtual time: the order of deliveries, and an end that cannot come."""

from __future__ import annotations

import pytest

from rollout.simulate.clock import Clock, SimulationStopped


def test_what_is_posted_comes_before_what_is_due_and_ties_keep_their_order() -> None:
    clock = Clock()
    heard: list[tuple[float, str]] = []

    def hear(name: str) -> None:
        heard.append((clock.now, name))
        if name == "first":
            clock.post(hear, "posted")
            clock.at(0.0, hear, "late")
        clock.over = name == "last"

    clock.after(2.0, hear, "last")
    clock.at(1.0, hear, "first")
    clock.at(1.0, hear, "second")
    clock.run(10.0, lambda: "")

    assert heard == [(1.0, "first"), (1.0, "posted"), (1.0, "late"), (1.0, "second"), (2.0, "last")]
    assert clock.events == 5


def test_an_end_that_cannot_come_is_said() -> None:
    with pytest.raises(SimulationStopped, match=r"nothing can happen at 0\.0 s: asleep"):
        Clock().run(10.0, lambda: "asleep")

    clock = Clock()
    clock.at(11.0, print)
    with pytest.raises(SimulationStopped, match="no end within 10 s: asleep"):
        clock.run(10.0, lambda: "asleep")
