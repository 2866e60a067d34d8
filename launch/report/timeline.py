"""The trace of a run as bars in lanes. Memory follows the bars that are shown, however long the trace is.

A lane is a process, a row of it a seat: an episode, request or span that overlaps another one gets a row of its own.
Bars of one row and one layer do not overlap, so the page finds those of a window by bisection. The layers are episodes,
and the parts that lie upon them.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from launch.report.blocks import Arrays
from rl.observe import trace_events as m
from rl.observe.alarms import RaisedAlarm
from rl.observe.trace import Source, TraceRecord, read_trace

_ENDS = ["trained", "evaluated", "stale", "redundant", "filtered", "settled", "failed", "open"]  # of a ticket
_PARTS = ["reset", "generate", "step", "prefill", "decode", "load"]
KINDS = [*_ENDS, *_PARTS]
MOST_BARS = 1_500_000
_KINDS = 256  # at most: one byte each
_SPARE = 4  # a fourth more are held, before the shortest are left out
_KIND = {name: number for number, name in enumerate(KINDS)}
_ROLES = ("learner", "generator", "env_server")
_MOST_REASONS = 12
_HELD_REASONS = 1000  # a reason may quote a model, so that there is no end of them
_MOST_TASKS = 20  # of one reason
_NO_REF = (1 << 32) - 1
_NO_TASK = -1  # the ticket was issued before the trace began


@dataclass
class Timeline:
    facts: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)
    waits: list[dict[str, Any]] = field(default_factory=list)
    """The waits of each process: its seconds, and how many of them it waited, by whom it waited for."""
    failures: list[tuple[str, int, list[int]]] = field(default_factory=list)
    """The most frequent reasons, how many tickets each ended, and of which tasks, the most frequent ones first."""


def gather_timeline(folder: Path, started: float, alarms: Sequence[RaisedAlarm] = ()) -> Timeline:
    """The timeline of a run; it has no lanes where no trace was kept. started: seconds of Unix time, where the timeline
    begins.

    Alarms come from their own file: it is complete where the supervisor's trace is missing or was cut.
    """
    builder = Builder(started)
    for record in read_trace(folder):
        builder.take(record)
    for alarm in alarms:
        builder.alarm(alarm)
    return builder.timeline()


class Lane:
    """The rows of one process. What begins takes the lowest free one and gives it back at its end.

    number: of the lane, where there are several.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.rows = 0
        self._free: list[int] = []

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self.rows += 1
        return self.rows - 1

    def give(self, row: int) -> None:
        heapq.heappush(self._free, row)


_REFS = 1 << 32  # a resumed run's tickets begin at a multiple of it, and are counted from there


Work = tuple[int, float, float]
"""How many bars, their seconds, and the longest."""


class Bars:
    """The columns of one layer: of its longest bars."""

    def __init__(self) -> None:
        self.first = math.inf
        """The first begin."""
        self._left_out = 0
        self._work: dict[tuple[int, int], Work] = {}  # of those that were left out
        self.lane = array("I")
        self.row = array("H")
        self.begin = array("d")
        self.end = array("d")
        self.kind = array("B")
        self.ref = array("d")  # a ticket of a resumed run has more than 32 bits

    def add(self, bar: OpenBar, end: float) -> None:
        if len(self.lane) >= MOST_BARS + MOST_BARS // _SPARE:
            self._leave_out()
        self.first = min(self.first, bar.begin)
        self.lane.append(bar.lane.number)
        self.row.append(bar.row)
        self.begin.append(bar.begin)
        self.end.append(max(end, bar.begin))
        self.kind.append(bar.kind)
        self.ref.append(bar.ref)

    def arrays(self, name: str, offsets: np.ndarray, rows: int, tick_s: float) -> tuple[Arrays, int]:
        """The bars by row and time, and how many of the shortest had to be left out.

        Within a row, a begin is told by its distance to the one before. offsets: the first row of each lane.
        """
        row = offsets[np.frombuffer(self.lane, np.uint32)] + np.frombuffer(self.row, np.uint16)
        begin = np.frombuffer(self.begin, np.float64)
        length = self._seconds()
        kept = self._longest()
        order = kept[np.lexsort((begin[kept], row[kept]))]

        # Ticks are whole numbers, so their distances can be summed up again without an error.
        starts = np.searchsorted(row[order], np.arange(rows + 1)).astype(np.uint32)
        ticks = np.maximum(0, begin[order] / tick_s).astype(np.uint32)
        steps = np.diff(ticks, prepend=np.uint32(0))
        firsts = starts[:-1][starts[:-1] < starts[1:]]
        steps[firsts] = ticks[firsts]

        columns = {
            "begin": steps,
            "length": np.ceil(length[order] / tick_s).astype(np.uint32),
            "kind": np.frombuffer(self.kind, np.uint8)[order],
            "ref": (np.frombuffer(self.ref, np.float64)[order] % _REFS).astype(np.uint32),
            "rows": starts,
        }
        left_out = self._left_out + len(row) - len(kept)
        return {f"{name}.{column}": values for column, values in columns.items()}, left_out

    def work(self) -> dict[tuple[int, int], Work]:
        """Of all bars by lane and kind, also of those that were left out."""
        found = dict(self._work)
        self._add_work(found, np.arange(len(self.lane)))
        return found

    def _add_work(self, found: dict[tuple[int, int], Work], places: np.ndarray) -> None:
        lane = np.frombuffer(self.lane, np.uint32).astype(np.int64)
        codes, group = np.unique((lane * _KINDS + np.frombuffer(self.kind, np.uint8))[places], return_inverse=True)
        seconds = self._seconds()[places]
        longest = np.zeros(len(codes))
        np.maximum.at(longest, group, seconds)

        new = zip(np.bincount(group).tolist(), np.bincount(group, seconds).tolist(), longest.tolist(), strict=True)
        for code, (count, summed, most) in zip(codes.tolist(), new, strict=True):
            key = divmod(code, _KINDS)
            before = found.get(key, (0, 0.0, 0.0))
            found[key] = (before[0] + count, before[1] + summed, max(before[2], most))

    def _seconds(self) -> np.ndarray:
        return np.frombuffer(self.end, np.float64) - np.frombuffer(self.begin, np.float64)

    def _longest(self) -> np.ndarray:
        """The places of as many as are shown, in their order."""
        excess = max(0, len(self.lane) - MOST_BARS)
        return np.sort(np.argpartition(self._seconds(), excess)[excess:]) if excess else np.arange(len(self.lane))

    def _leave_out(self) -> None:
        """The shortest ones; they go on to count as work."""
        kept = self._longest()
        left = np.setdiff1d(np.arange(len(self.lane)), kept)
        self._left_out += len(left)
        self._add_work(self._work, left)

        for name in ("lane", "row", "begin", "end", "kind", "ref"):
            column = getattr(self, name)
            setattr(self, name, array(column.typecode, np.asarray(column)[kept].tobytes()))


@dataclass(frozen=True)
class OpenBar:
    lane: Lane
    row: int
    begin: float
    kind: int
    ref: int


class Builder:
    """Takes a run's events in the order of time; `timeline` gives what they make."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._episodes = Bars()
        self._parts = Bars()

        self._seats: dict[int, OpenBar] = {}  # by ticket
        self._open: dict[tuple[Any, ...], OpenBar] = {}
        self._tasks: dict[int, int] = {}  # of the tickets that were issued
        self._reasons: defaultdict[str, Counter[int]] = defaultdict(Counter)  # of failures, by task
        self._kinds = dict(_KIND)  # grows by the names of the learner's spans
        self._ends: dict[int, int] = {}  # by ticket: the kind of its end
        self._marks: list[tuple[float, str, str, str]] = []  # second, kind, process, text
        self._seen: dict[Source, tuple[float, float]] = {}  # the first and the last moment
        self._pulses: dict[Source, m.Pulse] = {}
        self._longest: dict[Source, m.Wait] = {}

        self._step = 1  # the newest that a learner has begun
        self._last = 0.0
        self._events = 0

    def take(self, record: TraceRecord) -> None:
        now = record.time - self._started
        source = record.source
        self._events += 1
        self._last = max(self._last, now)
        self._seen[source] = (self._seen.get(source, (now, now))[0], now)

        match record.event:
            case m.Issued(ticket=ticket, task=task):
                self._tasks[ticket] = task
            case m.TicketEnded(ticket, end, reason):
                self._ended(ticket, _KIND.get(end, _KIND["open"]))
                task = self._tasks.pop(ticket, _NO_TASK)
                if reason:
                    self._failed(reason, task)
            case m.TakenBack(ticket):
                self._ended(ticket, _KIND["stale"])
            case m.Pulse() as pulse:
                self._pulse(pulse, source)

            case m.ProcessStarted(role, index, incarnation):
                if incarnation:
                    self._marks.append((now, "restart", f"{role}.{index}", f"incarnation {incarnation}"))
            case m.ProcessDied(role, index, _, how):
                self._marks.append((now, "death", f"{role}.{index}", how))
                if lane := self._lanes.get((role, index)):
                    self._abandon(lane, now)

            case m.RunEnded(reason):
                self._marks.append((now, "end", "", reason))
            case m.Published(_, version):
                self._marks.append((now, "weights", f"{source.role}.{source.index}", f"version {version}"))
            case event:
                self._bar(event, now, source)

    def _ended(self, ticket: int, kind: int) -> None:
        self._ends[ticket] = kind
        if len(self._ends) > MOST_BARS:
            self._note_ends()

    def _failed(self, reason: str, task: int) -> None:
        """Of too many reasons the more frequent half stays."""
        self._reasons[reason][task] += 1
        if len(self._reasons) > _HELD_REASONS:
            frequent = sorted(self._reasons, key=lambda each: -self._reasons[each].total())[: _HELD_REASONS // 2]
            self._reasons = defaultdict(Counter, {each: self._reasons[each] for each in frequent})

    def _pulse(self, pulse: m.Pulse, source: Source) -> None:
        self._pulses[source] = pulse
        if pulse.longest.seconds > self._longest.get(source, m.Wait()).seconds:
            step = pulse.longest.step if pulse.longest.step > 0 else self._step
            self._longest[source] = structs.replace(pulse.longest, step=step)

    def _bar(self, event: m.TraceEvent, now: float, source: Source) -> None:
        """Spans, loads and requests have a row each; what an episode does is in its own."""
        match event:
            case m.SpanBegan(name, step):
                self._step = max(self._step, step + 1)
                kind = self._kinds.setdefault(name, len(self._kinds))
                self._begin((source, name), kind, max(0, step), now, source)
            case m.SpanEnded(name):
                self._end((source, name), now)
            case m.LoadBegan(_, version):
                self._begin((source, "load"), _KIND["load"], max(0, version), now, source)
            case m.LoadEnded():
                self._end((source, "load"), now)

            case m.SamplingBegan(ticket, request):
                self._begin((source, request), _KIND["prefill"], ticket, now, source)
            case m.FirstToken(_, request):
                if bar := self._close((source, request), now):
                    self._open[source, request] = replace(bar, begin=now, kind=_KIND["decode"])
            case m.SamplingEnded(_, request):
                self._end((source, request), now)
            case event:
                self._episode(event, now, source)

    def _episode(self, event: m.TraceEvent, now: float, source: Source) -> None:
        match event:
            case m.ResetBegan(ticket):
                lane = self._lane(source)
                self._seats[ticket] = OpenBar(lane, lane.take(), now, _KIND["open"], ticket)
                self._part(ticket, "reset", now)
            case m.Requested(ticket):
                self._part(ticket, "generate", now)
            case m.StepBegan(ticket):
                self._part(ticket, "step", now)
            case m.ResetEnded(ticket) | m.Answered(ticket) | m.StepEnded(ticket):
                self._close(("part", ticket), now)

            case m.EpisodeEnded(ticket):
                self._close(("part", ticket), now)
                self._leave_seat(ticket, now)

    def _begin(self, key: tuple[Any, ...], kind: int, ref: int, now: float, source: Source) -> None:
        lane = self._lane(source)
        self._open[key] = OpenBar(lane, lane.take(), now, kind, ref)

    def _end(self, key: tuple[Any, ...], now: float) -> None:
        if bar := self._close(key, now):
            bar.lane.give(bar.row)

    def _part(self, ticket: int, kind: str, now: float) -> None:
        """What an episode does from now on, in its row."""
        if seat := self._seats.get(ticket):
            self._open["part", ticket] = OpenBar(seat.lane, seat.row, now, _KIND[kind], ticket)

    def _leave_seat(self, ticket: int, now: float) -> None:
        if seat := self._seats.pop(ticket, None):
            self._episodes.add(seat, now)
            seat.lane.give(seat.row)

    def _note_ends(self) -> None:
        """Give each episode's bar the end of its ticket, and forget it, but for episodes that go on; what is told later
        of a ticket counts."""
        kinds = self._episodes.kind
        for number, ticket in enumerate(self._episodes.ref):
            kinds[number] = self._ends.get(int(ticket), kinds[number])
        self._ends = {ticket: self._ends[ticket] for ticket in self._seats if ticket in self._ends}

    def _close(self, key: tuple[Any, ...], now: float) -> OpenBar | None:
        bar = self._open.pop(key, None)
        if bar is not None:
            self._parts.add(bar, now)
        return bar

    def alarm(self, alarm: RaisedAlarm) -> None:
        self._marks.append((alarm.time - self._started, "alarm", "", f"{alarm.name}: {alarm.detail}"))

    def _abandon(self, lane: Lane | None, now: float) -> None:
        """What a dead process had begun ends here; without a lane: what the whole trace leaves open."""
        for key in [key for key, bar in self._open.items() if lane in (None, bar.lane)]:
            (self._close if key[0] == "part" else self._end)(key, now)
        for ticket in [ticket for ticket, bar in self._seats.items() if lane in (None, bar.lane)]:
            self._leave_seat(ticket, now)

    def _lane(self, source: Source) -> Lane:
        return self._lanes.setdefault((source.role, source.index), Lane(len(self._lanes)))

    def timeline(self) -> Timeline:
        self._abandon(None, self._last)
        found = Timeline(waits=self._waits(), failures=self._failures())
        if not self._lanes:
            return found

        place = {role: number for number, role in enumerate(_ROLES)}
        names = sorted(self._lanes, key=lambda name: (place.get(name[0], len(place)), name))
        offsets = np.zeros(len(names), np.uint32)  # by the number of a lane
        rows = 0
        for name in names:
            offsets[self._lanes[name].number] = rows
            rows += self._lanes[name].rows

        tick_s = max(1e-6, self._last / (_NO_REF - 1))
        self._note_ends()
        episodes, no_episodes = self._episodes.arrays("episodes", offsets, rows, tick_s)
        parts, no_parts = self._parts.arrays("parts", offsets, rows, tick_s)

        found.arrays = episodes | parts

        found.facts = {
            "lanes": [{"name": f"{role}.{index}", "rows": self._lanes[role, index].rows} for role, index in names],
            "work": self._work(names),
            "marks": sorted(self._marks),
            "kinds": list(self._kinds),
            "tick": tick_s,
            "first": max(0.0, min(self._episodes.first, self._parts.first, self._last)),
            "seconds": self._last,
            "events": self._events,
            "leftOut": no_episodes + no_parts,
        }
        return found

    def _failures(self) -> list[tuple[str, int, list[int]]]:
        counted = [(reason, tasks.total(), tasks) for reason, tasks in self._reasons.items()]
        counted.sort(key=lambda each: -each[1])
        return [
            (reason, count, [task for task, _ in tasks.most_common(_MOST_TASKS) if task != _NO_TASK])
            for reason, count, tasks in counted[:_MOST_REASONS]
        ]

    def _work(self, names: list[tuple[str, int]]) -> list[dict[str, Any]]:
        """The work of each lane, by kind of part: how many, their mean and the longest in seconds."""
        kinds = list(self._kinds)
        found: dict[int, dict[str, Any]] = {self._lanes[name].number: {} for name in names}
        for (lane, kind), (count, seconds, longest) in sorted(self._parts.work().items()):
            found[lane][kinds[kind]] = (count, seconds / count, longest)
        return list(found.values())

    def _waits(self) -> list[dict[str, Any]]:
        """The waits over all incarnations of a process."""
        found: dict[str, dict[str, Any]] = {}
        for source, pulse in self._pulses.items():
            first, last = self._seen[source]
            name = f"{source.role}.{source.index}"
            process = found.setdefault(name, {"name": name, "seconds": 0.0, "causes": {}, "longest": (0.0, "", -1)})
            process["seconds"] += last - first

            idle = {"work": pulse.stats["idle_s"]} if "idle_s" in pulse.stats else {}  # no wait in older traces
            for cause, seconds in (idle | pulse.waits).items():
                process["causes"][cause] = process["causes"].get(cause, 0.0) + seconds
            if wait := self._longest.get(source):
                process["longest"] = max(process["longest"], (wait.seconds, wait.whom, wait.step))
        return [found[name] for name in sorted(found)]
