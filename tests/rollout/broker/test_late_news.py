"""A broker that begins late hears of deaths before its time, and must not take the living for the dead."""

from __future__ import annotations

from rl.wire.messages import PeerDied, SaveRequest, Version
from rl.wire.process import Process
from rl.wire.run import ProcessContext
from rl.wire.sockets import identity
from rollout.broker.process import Broker
from tests.conftest import MakeRun


def test_what_a_new_learner_asked_for_outlives_the_news_of_the_old_ones_death(make_run: MakeRun) -> None:
    broker = Broker(Process("broker", ProcessContext(make_run(), 0, 1)))
    broker.core.groups.e = 1  # a batch was assembled, and its version is on its way
    request = SaveRequest(Version(0, 1))
    try:
        broker._from_learner(request, identity("learner", 0, 2))
        for incarnation in (0, 1):
            broker._from_supervisor(PeerDied("learner", 0, incarnation))
        assert broker._saves == [request]

        broker._from_supervisor(PeerDied("learner", 1, 2))  # another rank: all of them begin again
        assert not broker._saves
    finally:
        broker.close()
