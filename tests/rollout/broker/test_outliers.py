"""A process whose turns are nearly all slow is named; one that stands still for a while, as on a busy box, is not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rl.config.alarms import AlarmsConfig
from rl.observe.alarms import Alarms
from rl.wire.messages import Ticket, Turn, Version
from rollout.broker.actions import BatchSample, EpisodeOutcome
from rollout.broker.guards import Outliers
from tests.rollout.trajectories import make_trajectory, with_sequence

QUICK_S = 0.5  # of a turn of four tokens, and of an environment's step
SAMPLES = 32  # of a batch; servers and generators take turns


class Run:
    """Batches of two servers and two generators."""

    def __init__(self, alpha: float) -> None:
        self.raised: list[tuple[int, str, str]] = []
        self.step = 0
        alarms = Alarms(AlarmsConfig(), lambda name, found: self.raised.append((self.step, name, found)))
        self._outliers = Outliers(alarms, alpha)

    def batch(self, generate_s: dict[int, float], env_s: dict[int, float]) -> None:
        """Seconds of a turn, where they are not the usual ones."""
        samples = []
        for place in range(SAMPLES):
            generator, server = place % 2, place // 2 % 2
            seconds = generate_s.get(generator, QUICK_S), env_s.get(server, QUICK_S)
            turn = Turn(2, 6, 1.0, *seconds, "stop", generator)
            ticket = Ticket(place, place, place, 0, Version(0, self.step))
            played = replace(with_sequence(make_trajectory(ticket, place, 1.0), turns=[turn]), server=server)
            samples.append(BatchSample(place, place, 0, 0, EpisodeOutcome(0, self.step, 1.0, 4, payload=played)))
        self._outliers.batch(self.step, samples)
        self.step += 1


@pytest.mark.parametrize("alpha", [0, 1, 3])
def test_what_is_always_slow_is_named_whichever_it_is(alpha: float) -> None:
    run = Run(alpha)
    for _ in range(20):
        run.batch({1: 4 * QUICK_S}, {0: 4 * QUICK_S})
    first = {name: step for step, name, _ in reversed(run.raised)}
    assert set(first) == {"slow-server", "slow-generator"}
    assert max(first.values()) < max(6, 3 * (1 + alpha))
    assert all("generator.1 " in found for _, name, found in run.raised if name == "slow-generator")
    assert all("env_server.0 " in found for _, name, found in run.raised if name == "slow-server")


@pytest.mark.parametrize("alpha", [0, 1, 3])
def test_a_stall_delays_all_that_is_in_flight_and_is_no_outlier(alpha: int) -> None:
    """It may come at once after the start, and there may be two of them, ten seconds long."""
    for begin in range(12):
        run = Run(alpha)
        for step in range(30):
            stalled = {1: 10.0} if begin <= step < begin + 2 * (1 + alpha) else {}
            run.batch(stalled, stalled)
        assert run.raised == []


def test_those_that_stand_still_by_turns_are_equals() -> None:
    run = Run(1)
    for step in range(40):
        stalled = {step // 3 % 2: 10.0}
        run.batch(stalled, stalled)
    assert run.raised == []
