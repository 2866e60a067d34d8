"""The trace that was never lived is one that readers accept, and the cost of a trace is counted right."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.bench._synthetic_trace import write_trace
from experiments.bench.trace import cost
from rl.observe.trace import Source, TraceRecord, read_trace
from rl.observe.trace_events import Delivered, Issued, LoadEnded, ProcessDied, Pulse, TicketEnded, TraceEvent


def test_a_synthetic_trace_is_as_long_as_wanted_and_has_what_a_run_has(tmp_path: Path) -> None:
    assert write_trace(tmp_path, 30_000) == 30_000
    events = list(read_trace(tmp_path))
    assert len(events) == 30_000
    assert [record.time for record in events] == sorted(record.time for record in events)

    kinds = {type(record.event) for record in events}
    assert {Issued, LoadEnded, ProcessDied} <= kinds
    issued = [record.event.ticket for record in events if isinstance(record.event, Issued)]
    ended = [record.event.ticket for record in events if isinstance(record.event, TicketEnded)]
    assert len(issued) == len(set(issued)) and len(ended) == len(set(ended)) and set(ended) < set(issued)
    assert {record.source.incarnation for record in events if record.source.role == "generator"} == {0, 1}


def test_the_cost_is_what_the_last_pulses_say_and_what_leads_to_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.bench.trace.seconds_of_a_call", lambda: 0.01)
    broker = Source("broker", 0, 0)
    told: list[tuple[Source, TraceEvent]] = [
        (broker, Pulse(True, 0, 5.0, {}, {}, 0.5)),
        (broker, Delivered(1, 30)),
        (broker, Delivered(2, 50)),
        (broker, TicketEnded(1, "trained")),
        (broker, TicketEnded(2, "stale")),
        (broker, Pulse(True, 9, 15.0, {}, {}, 0.6)),
        (Source("proxy", 0, 0), Pulse(True, 0, 2.0, {}, {}, 0.0)),
        (Source("proxy", 0, 0), Pulse(True, 0, 12.0, {}, {}, 0.0)),
    ]
    figures = cost((TraceRecord(0.0, source, event) for source, event in told), cpu_s=20.0)
    assert figures["events"] == 8 and figures["trained_tokens"] == 30
    assert figures["trace_percent"] == pytest.approx(100 * (0.6 + 8 * 0.01) / 20)
