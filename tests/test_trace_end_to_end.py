"""The trace of whole runs: every ticket's events are there, in order, with exactly one end, whoever is killed."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from rl.observe.trace import FOLDER, Source, TraceRecord, read_trace
from rl.observe.trace_events import (
    Answered,
    Batched,
    Delivered,
    EngineState,
    EpisodeEnded,
    FirstToken,
    Issued,
    LoadBegan,
    LoadEnded,
    ProcessDied,
    ProcessStarted,
    Published,
    Pulse,
    Requested,
    ResetBegan,
    ResetEnded,
    RunEnded,
    SamplingBegan,
    SamplingEnded,
    SpanBegan,
    SpanEnded,
    StepBegan,
    StepEnded,
    TicketEnded,
    TraceEvent,
)
from tests.test_end_to_end_simulated import check_books, finish, pid_of, start, wait_for_step

TURN = [Requested, SamplingBegan, FirstToken, SamplingEnded, Answered, StepBegan, StepEnded]
PLAYED = [Issued, ResetBegan, ResetEnded, *TURN, *TURN, EpisodeEnded, Delivered]


def by_ticket(events: list[TraceRecord]) -> dict[int, list[TraceEvent]]:
    """Each ticket's own events, by time."""
    lives: defaultdict[int, list[TraceEvent]] = defaultdict(list)
    for record in events:
        if isinstance(ticket := getattr(record.event, "ticket", None), int):
            lives[ticket].append(record.event)
    return lives


def ends_of(events: list[TraceRecord]) -> Counter[str]:
    """How tickets ended. Every issued one has, exactly once and after its issue."""
    issued: set[int] = set()
    ended: set[int] = set()
    ends: Counter[str] = Counter()

    for record in events:
        match record.event:
            case Issued(ticket):
                assert ticket not in issued
                issued.add(ticket)
            case TicketEnded(ticket, end):
                assert ticket in issued and ticket not in ended
                ended.add(ticket)
                ends[end] += 1

    assert issued == ended
    return ends


def test_every_ticket_of_a_run_is_told_from_its_issue_to_its_end(tmp_path: Path) -> None:
    summary = finish(start(tmp_path, "rollout.redundant_groups=1", "rollout.redundant_episodes=1"), tmp_path)
    check_books(summary, steps=20)
    events = list(read_trace(tmp_path / "simulated"))
    ends = ends_of(events)

    samples = summary["ledger"]["samples"]
    assert ends["trained"] == samples["trained"] == 20 * 16
    assert ends["evaluated"] == 2 * 8
    assert 0 < ends["redundant"] <= samples["redundant"]  # a queued sample had no ticket

    lives = by_ticket(events)
    trained = {ticket: life for ticket, life in lives.items() if TicketEnded(ticket, "trained") in life}
    assert len(trained) == 320
    for life in trained.values():
        assert [type(event) for event in life] == [*PLAYED, TicketEnded]

    batches = [record.event for record in events if isinstance(record.event, Batched)]
    assert [batch.step for batch in batches] == list(range(20))
    assert {ticket for batch in batches for ticket in batch.tickets} == set(trained)

    check_learner(events)
    check_generators(events)
    started = {record.event for record in events if isinstance(record.event, ProcessStarted)}
    assert {record.source for record in events} == {Source("supervisor", 0, 0)} | {
        Source(each.role, each.index, each.incarnation) for each in started
    }
    assert RunEnded("finished") in [record.event for record in events]


def check_learner(events: list[TraceRecord]) -> None:
    """Its waits and phases, all of which end."""
    mine = [record.event for record in events if record.source.role == "learner" and record.source.index == 0]
    began = Counter((event.name, event.step) for event in mine if isinstance(event, SpanBegan))
    ended = Counter((event.name, event.step) for event in mine if isinstance(event, SpanEnded))
    assert began == ended
    for step in range(20):
        assert began["wait broker", step] >= 1 and began["train", step] == 1
    assert [event.version for event in mine if isinstance(event, Published)] == list(range(21))


def check_generators(events: list[TraceRecord]) -> None:
    """What is loaded was published before, and versions only grow."""
    published = -1
    loaded: defaultdict[Source, list[int]] = defaultdict(list)
    for record in events:
        match record.event:
            case Published(_, version):
                published = version
            case LoadBegan(_, version):
                assert version <= published + 1  # the notice is sent a moment before it is traced
            case LoadEnded(_, version, _, error):
                assert not error
                loaded[record.source].append(version)

    assert len(loaded) == 2
    assert all(versions == sorted(set(versions)) for versions in loaded.values())
    assert any(isinstance(record.event, EngineState) and record.event.running for record in events)


def test_kills_cost_no_ticket_its_end(tmp_path: Path) -> None:
    """The broker is among them: its successor tells what the log has and the trace has not, and nothing twice."""
    # One server, so that it has begun once steps are trained; and what the learner waits for is in it, at any time.
    process = start(tmp_path, "steps=40", "env.servers=1", "generator.options.decode_base_s=0.004")
    for step, role in ((5, "envs.server"), (12, "rollout.broker.process"), (25, "rollout.generator.process")):
        wait_for_step(tmp_path, step)
        os.kill(pid_of(tmp_path, role), signal.SIGKILL)
    summary = finish(process, tmp_path)

    events = list(read_trace(tmp_path / "simulated"))
    ends = ends_of(events)
    assert ends["trained"] == summary["ledger"]["samples"]["trained"] == 40 * 16

    failed = [
        record.event for record in events if isinstance(record.event, TicketEnded) and record.event.end == "failed"
    ]
    assert "environment server 0 died" in {event.reason for event in failed}
    died = [record.event for record in events if isinstance(record.event, ProcessDied)]
    assert [event.role for event in died] == ["env_server", "broker", "generator"]
    assert all("SIGKILL" in event.how for event in died)


@pytest.mark.parametrize("level", ["off", "steps"])
def test_a_level_leaves_out_what_it_says(tmp_path: Path, level: str) -> None:
    finish(start(tmp_path, "steps=2", f"tracking.trace={level}"), tmp_path)
    kinds = {type(record.event) for record in read_trace(tmp_path / "simulated")}

    assert (tmp_path / "simulated" / FOLDER).exists() == (level == "steps")
    expected = {SpanBegan, SpanEnded, LoadBegan, LoadEnded, Published, Pulse, ProcessStarted, RunEnded}
    assert kinds == (expected if level == "steps" else set())
