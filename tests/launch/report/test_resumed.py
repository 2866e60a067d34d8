"""The timeline of a run that was resumed: its tickets have large numbers (`rollout/broker/tickets.py`)."""

from __future__ import annotations

from launch.report.timeline import Bars, Lane, OpenBar
from rollout.broker.tickets import _EPOCH_TICKETS


def test_tickets_of_a_later_timeline_are_counted_from_its_first() -> None:
    bars = Bars()
    for timeline in (0, 1, 5):
        bars.add(OpenBar(Lane(), 0, 1.0, 2, timeline * _EPOCH_TICKETS + 7), 2.0)
    assert list(bars.ref) == [7, 7, 7]
