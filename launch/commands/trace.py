"""`fresco trace RUN`: the run's life as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

One process of the picture is one process of the run. An environment server has a lane for each episode that it plays at
once, with reset, generations and steps inside the episode's bar. A generator has a lane for each request that it runs
at once, its weight loads, and counters. The learner has its phases and waits. Arrows lead from requests to the
generators that answer them. What has not ended (yet, or because its process died) is a bar up to there with
`unfinished` among its arguments.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from launch.report.timeline import Lane
from rl.config.schema import ConfigError
from rl.observe import trace_events
from rl.observe.trace import Source, TraceRecord, read_trace

Row = dict[str, Any]
_MAIN = 0  # the thread of what is neither episode nor request


@dataclass
class _Bar:
    began: float
    lane: int
    name: str
    arguments: Row


@dataclass
class _Process:
    """One process of the picture: its bars that have not ended, and its lanes. Lanes are numbered from 1."""

    threads: list[int]
    """The number of each lane in the whole picture; the first is the process's own."""
    open: dict[tuple[Any, ...], _Bar] = field(default_factory=dict)
    lanes: dict[int, int] = field(default_factory=dict)  # by ticket
    seats: Lane = field(default_factory=Lane)

    def leave_lane(self, ticket: int) -> None:
        if (lane := self.lanes.pop(ticket, None)) is not None:
            self.seats.give(lane - 1)


class ChromeTrace:
    """Turns the events of a trace, in their order, into rows of Chrome's format. Memory holds what is open."""

    def __init__(self) -> None:
        self._processes: dict[Source, _Process] = {}
        self._issued: dict[int, trace_events.Issued] = {}
        self._flows: dict[int, int] = {}  # by ticket: the arrow from its last request
        self._flow = 0
        self._numbers = itertools.count(1)  # Perfetto takes threads of one number for one, also of two processes
        self._start: float | None = None
        self._now = 0.0

    def rows(self, events: Iterable[TraceRecord]) -> Iterator[Row]:
        for record in events:
            self._start = record.time if self._start is None else self._start
            self._now = record.time

            process = self._processes.get(record.source)
            if process is None:
                process = self._processes[record.source] = _Process([next(self._numbers)])
                yield from self._names(process, record.source)
            yield from self._row(process, record.event)

        for process in self._processes.values():
            yield from self._cut(process)

    # ------------------------------------------------------------ events

    def _row(self, process: _Process, event: trace_events.TraceEvent) -> Iterator[Row]:
        match event:
            case trace_events.Issued(ticket):
                self._issued[ticket] = event
            case trace_events.Batched(step, tickets):
                yield self._mark(process, f"batch {step}", {"tickets": len(tickets)})
            case trace_events.TicketEnded(ticket, end, reason):
                yield self._mark(process, end, {"ticket": ticket, "reason": reason})

            case trace_events.SpanBegan(name, step):
                self._begin(process, (name, step), _MAIN, name, {"step": step})
            case trace_events.SpanEnded(name, step):
                yield from self._end(process, (name, step))
            case trace_events.Published(_, version):
                yield self._mark(process, f"version {version}", {})

            case trace_events.ProcessStarted(role, index, incarnation):
                if incarnation:
                    yield self._mark(process, f"{role}.{index} starts again", {"incarnation": incarnation})
            case trace_events.ProcessDied(role, index, incarnation, how):
                yield self._mark(process, f"{role}.{index} died", {"how": how})
                if (dead := self._processes.get(Source(role, index, incarnation))) is not None:
                    yield from self._cut(dead)
            case trace_events.AlarmShown(name, detail):
                yield self._mark(process, f"alarm {name}", {"detail": detail})
            case trace_events.RunEnded(reason):
                yield self._mark(process, "end", {"reason": reason})

            case trace_events.EngineState() | trace_events.LoadBegan() | trace_events.LoadEnded():
                yield from self._of_generator(process, event)
            case trace_events.SamplingBegan() | trace_events.SamplingEnded() | trace_events.FirstToken():
                yield from self._of_request(process, event)
            case _:
                yield from self._of_episode(process, event)

    def _of_generator(self, process: _Process, event: trace_events.TraceEvent) -> Iterator[Row]:
        match event:
            case trace_events.EngineState(running, held):
                counts = {"running": running, "held": held}
                yield self._base(process, _MAIN, "C", "requests") | {"args": counts}
            case trace_events.LoadBegan(_, version):
                self._begin(process, ("load",), _MAIN, f"load version {version}", {})
            case trace_events.LoadEnded(seconds=seconds, error=error):
                yield from self._end(process, ("load",), **seconds, **({"error": error} if error else {}))

    def _of_request(self, process: _Process, event: trace_events.TraceEvent) -> Iterator[Row]:
        match event:
            case trace_events.SamplingBegan(ticket, request, held_s):
                yield from self._take_lane(process, request, "request")
                lane = process.lanes[request]
                self._begin(process, ("sampling", request), lane, f"ticket {ticket}", {"held_s": held_s})
                if ticket in self._flows:
                    yield self._arrow(process, lane, "f", self._flows[ticket])

            case trace_events.FirstToken(_, request, version):
                if (bar := process.open.get(("sampling", request))) is not None:
                    bar.arguments |= {"version": version, "first_token_s": self._now - bar.began}
            case trace_events.SamplingEnded(_, request, tokens, finish_reason):
                yield from self._end(process, ("sampling", request), tokens=tokens, finish_reason=finish_reason)
                process.leave_lane(request)

    def _of_episode(self, process: _Process, event: trace_events.TraceEvent) -> Iterator[Row]:
        match event:
            case trace_events.ResetBegan(ticket):
                yield from self._take_lane(process, ticket, "episode")
                lane = process.lanes[ticket]
                issued = self._issued.pop(ticket, None)
                self._begin(process, ("episode", ticket), lane, f"ticket {ticket}", _of_ticket(issued))
                self._begin(process, ("reset", ticket), lane, "reset", {})

            case trace_events.ResetEnded(ticket):
                yield from self._end(process, ("reset", ticket))
            case trace_events.Requested(ticket, turn, prompt_tokens):
                lane = process.lanes.get(ticket, _MAIN)
                arguments = {"turn": turn, "prompt_tokens": prompt_tokens}
                self._begin(process, ("generate", ticket), lane, "generate", arguments)
                self._flow += 1
                self._flows[ticket] = self._flow
                yield self._arrow(process, lane, "s", self._flow)
            case trace_events.Answered(ticket, _, generator, tokens, reason):
                found = {"generator": generator, "tokens": tokens, "finish_reason": reason}
                yield from self._end(process, ("generate", ticket), **found)

            case trace_events.StepBegan(ticket, turn):
                lane = process.lanes.get(ticket, _MAIN)
                self._begin(process, ("step", ticket), lane, "step", {"turn": turn})
            case trace_events.StepEnded(ticket, _, reward):
                yield from self._end(process, ("step", ticket), reward=reward)
            case trace_events.EpisodeEnded(ticket, end, turns, tokens, reward, success, reason):
                for part in ("reset", "generate", "step"):
                    yield from self._end(process, (part, ticket), unfinished=True)
                found = {"end": end, "turns": turns, "tokens": tokens, "reward": reward, "success": success}
                yield from self._end(process, ("episode", ticket), **found, **({"reason": reason} if reason else {}))
                process.leave_lane(ticket)
                self._flows.pop(ticket, None)

    # ------------------------------------------------------------ rows

    def _begin(self, process: _Process, key: tuple[Any, ...], lane: int, name: str, arguments: Row) -> None:
        process.open[key] = _Bar(self._now, lane, name, arguments)

    def _end(self, process: _Process, key: tuple[Any, ...], **arguments: Any) -> Iterator[Row]:
        if (bar := process.open.pop(key, None)) is not None:
            row = self._base(process, bar.lane, "X", bar.name, at=bar.began)
            yield row | {"dur": self._microseconds(self._now) - row["ts"], "args": bar.arguments | arguments}

    def _cut(self, process: _Process) -> Iterator[Row]:
        """End its open bars here, the innermost first."""
        for key in reversed(list(process.open)):
            yield from self._end(process, key, unfinished=True)

    def _mark(self, process: _Process, name: str, arguments: Row) -> Row:
        return self._base(process, _MAIN, "i", name) | {"s": "p", "args": arguments}

    def _arrow(self, process: _Process, lane: int, phase: str, number: int) -> Row:
        row = self._base(process, lane, phase, "request") | {"id": number, "cat": "request"}
        return row | {"bp": "e"} if phase == "f" else row

    def _base(self, process: _Process, lane: int, phase: str, name: str, at: float | None = None) -> Row:
        at_us = self._microseconds(self._now if at is None else at)
        return {"ph": phase, "pid": process.threads[0], "tid": process.threads[lane], "ts": at_us, "name": name}

    def _microseconds(self, time: float) -> float:
        """Microseconds since the start, in eighths: sums of them are exact, and whole nanoseconds. Perfetto drops a bar
        that reaches beyond the one around it, by however little.
        """
        return round(8e6 * (time - (self._start or 0.0))) / 8

    def _names(self, process: _Process, source: Source) -> Iterator[Row]:
        yield {"ph": "M", "pid": process.threads[0], "name": "process_name", "args": {"name": str(source)}}
        yield self._thread(process, _MAIN, source.role)

    def _take_lane(self, process: _Process, ticket: int, what: str) -> Iterator[Row]:
        """The lowest free one, which is named where it is new."""
        lane = process.lanes[ticket] = process.seats.take() + 1
        if lane == len(process.threads):
            process.threads.append(next(self._numbers))
            yield self._thread(process, lane, f"{what} {lane}")

    def _thread(self, process: _Process, lane: int, name: str) -> Row:
        numbers = {"pid": process.threads[0], "tid": process.threads[lane]}
        return {"ph": "M", **numbers, "name": "thread_name", "args": {"name": name}}


def _of_ticket(issued: trace_events.Issued | None) -> Row:
    if issued is None:
        return {}
    return {"kind": issued.kind, "group": issued.group, "task": issued.task, "version": issued.version}


def write_chrome_trace(run: Path, file: BinaryIO | gzip.GzipFile) -> int:
    """How many rows were written. Each stands in a line of its own."""
    count = 0
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    for count, row in enumerate(ChromeTrace().rows(read_trace(run)), 1):
        file.write((b"\n" if count == 1 else b",\n") + msgspec.json.encode(row))
    file.write(b"\n]}\n")
    return count


def export(arguments: argparse.Namespace) -> int:
    """Write the file. Raises ConfigError where no trace was kept."""
    run: Path = arguments.run
    if next(read_trace(run), None) is None:
        raise ConfigError(f"{str(run)!r} has no trace: no folder of a run, or one with tracking.trace=off")

    out: Path = arguments.out or run / "trace.json.gz"
    with gzip.open(out, "wb", compresslevel=3) if out.suffix == ".gz" else out.open("wb") as file:
        count = write_chrome_trace(run, file)
    print(f"{count} events in {out}: open it in https://ui.perfetto.dev")
    return 0
