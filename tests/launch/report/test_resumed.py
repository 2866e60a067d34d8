"""The timeline of a run that was resumed: its tickets have large numbers (`rollout/broker/tickets.py`)."""

from __future__ import annotations

import pytest

from rl.observe.trace import Source
from rl.observe.trace_events import EpisodeEnded, ResetBegan, ResetEnded, TicketEnded
from rollout.broker.tickets import _EPOCH_TICKETS
from tests.launch.report.test_gather import built

SERVER = Source("env_server", 0, 0)


@pytest.mark.parametrize("timeline", [0, 1, 5])
def test_tickets_of_a_later_timeline_are_counted_from_its_first_and_have_their_ends(timeline: int) -> None:
    ticket = timeline * _EPOCH_TICKETS + 7
    bars, _ = built(
        (0.0, SERVER, ResetBegan(ticket)),
        (1.0, SERVER, ResetEnded(ticket)),
        (2.0, SERVER, EpisodeEnded(ticket, "done", 1)),
        (3.0, Source("broker", 0, 0), TicketEnded(ticket, "trained")),
    )
    assert [bar[3:] for bar in bars["episodes"]] == [("trained", 7)]
