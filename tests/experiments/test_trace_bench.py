"""The trace that was never lived is one that readers accept, and the cost of a trace is counted right."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.bench._synthetic_trace import write_trace
from experiments.bench.trace import cost
from rl.core.moments import Delivered, Issued, LoadEnded, Moment, ProcessDied, Pulse, TicketEnded
from rl.core.trace import Source, TraceEvent, read_trace


def test_a_synthetic_trace_is_as_long_as_wanted_and_has_what_a_run_has(tmp_path: Path) -> None:
    assert write_trace(tmp_path, 30_000) == 30_000
    events = list(read_trace(tmp_path))
    assert len(events) == 30_000
    assert [event.time for event in events] == sorted(event.time for event in events)

    kinds = {type(event.moment) for event in events}
    assert {Issued, LoadEnded, ProcessDied} <= kinds
    issued = [event.moment.ticket for event in events if isinstance(event.moment, Issued)]
    ended = [event.moment.ticket for event in events if isinstance(event.moment, TicketEnded)]
    assert len(issued) == len(set(issued)) and len(ended) == len(set(ended)) and set(ended) < set(issued)
    assert {event.source.incarnation for event in events if event.source.role == "generator"} == {0, 1}


def test_the_cost_is_what_the_last_pulses_say_and_what_leads_to_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.bench.trace.seconds_of_a_call", lambda: 0.01)
    broker = Source("broker", 0, 0)
    told: list[tuple[Source, Moment]] = [
        (broker, Pulse(True, 0, 5.0, {}, {}, 0.5)),
        (broker, Delivered(1, 30)),
        (broker, Delivered(2, 50)),
        (broker, TicketEnded(1, "trained")),
        (broker, TicketEnded(2, "stale")),
        (broker, Pulse(True, 9, 15.0, {}, {}, 0.6)),
        (Source("proxy", 0, 0), Pulse(True, 0, 2.0, {}, {}, 0.0)),
        (Source("proxy", 0, 0), Pulse(True, 0, 12.0, {}, {}, 0.0)),
    ]
    figures = cost((TraceEvent(0.0, source, moment) for source, moment in told), cpu_s=20.0)
    assert figures["events"] == 8 and figures["trained_tokens"] == 30
    assert figures["trace_percent"] == pytest.approx(100 * (0.6 + 8 * 0.01) / 20)
