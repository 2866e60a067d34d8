"""Traces that were never lived: as many events as wanted, of every kind that a real run has, in a few seconds.

Episodes of some turns on all lanes of all servers; every 64 that are delivered make a batch, which the learner trains,
and whose version the generators load. Times are spread evenly. Once a generator dies and is started again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from rl.observe import trace_events
from rl.observe.trace import FOLDER, FORMAT, SUFFIX, Source, boot_id, encode_record

GENERATORS = 4
SERVERS = 4
LANES = 32  # episodes of a server
BATCH = 64  # tickets
TURNS = 4
STEP_S = 0.001  # from one event to the next, of whatever process

Told = tuple[Source, trace_events.TraceEvent]
BROKER = Source("broker", 0, 0)
LEARNER = Source("learner", 0, 0)
SUPERVISOR = Source("supervisor", 0, 0)


class Life:
    """Everything that happens, one thing after another."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tickets = 0
        self.requests = 0
        self.version = 0
        self.generators = [Source("generator", index, 0) for index in range(GENERATORS)]
        self.delivered: list[int] = []

    def __iter__(self) -> Iterator[Told]:
        lanes = [self.episodes(Source("env_server", index, 0)) for index in range(SERVERS) for _ in range(LANES)]
        yield LEARNER, trace_events.SpanBegan("wait broker", 0)
        while True:
            yield next(self.random.choice(lanes))
            if len(self.delivered) >= BATCH:
                yield from self.step(self.delivered[:BATCH])
                del self.delivered[:BATCH]

    def episodes(self, server: Source) -> Iterator[Told]:
        while True:
            ticket = self.tickets
            self.tickets += 1
            group, member = divmod(ticket, 8)
            yield (
                BROKER,
                trace_events.Issued(ticket, "train", group, member, group % 500, self.version, 0, server.index),
            )
            yield server, trace_events.ResetBegan(ticket)
            yield server, trace_events.ResetEnded(ticket)
            for turn in range(1, TURNS + 1):
                yield from self.turn(server, ticket, turn)

            reward = self.random.random()
            yield server, trace_events.EpisodeEnded(ticket, "done", TURNS, 20 * TURNS, reward, reward > 0.5)
            yield BROKER, trace_events.Delivered(ticket, 20 * TURNS)
            if self.random.random() < 0.05:
                yield BROKER, trace_events.TicketEnded(ticket, "stale")
            else:
                self.delivered.append(ticket)

    def turn(self, server: Source, ticket: int, turn: int) -> Iterator[Told]:
        request = self.requests
        self.requests += 1
        generator = self.random.choice(self.generators)
        yield server, trace_events.Requested(ticket, turn, 100 * turn)
        yield generator, trace_events.SamplingBegan(ticket, request, 0.0)
        yield generator, trace_events.FirstToken(ticket, request, self.version)
        yield generator, trace_events.SamplingEnded(ticket, request, 20, "stop")
        yield generator, trace_events.EngineState(self.random.randrange(LANES), 0, 20 * request, self.version)
        yield server, trace_events.Answered(ticket, turn, generator.index, 20, "stop")
        yield server, trace_events.StepBegan(ticket, turn)
        yield server, trace_events.StepEnded(ticket, turn, 0.0)

    def step(self, tickets: list[int]) -> Iterator[Told]:
        yield BROKER, trace_events.Batched(self.version, tuple(tickets))
        yield LEARNER, trace_events.SpanEnded("wait broker", self.version)
        yield LEARNER, trace_events.SpanBegan("train", self.version)
        yield LEARNER, trace_events.SpanEnded("train", self.version)
        self.version += 1
        yield LEARNER, trace_events.Published(0, self.version)
        for ticket in tickets:
            yield BROKER, trace_events.TicketEnded(ticket, "trained")

        if self.version == 3:
            yield from self.death()
        for generator in self.generators:
            yield generator, trace_events.LoadBegan(0, self.version)
            yield generator, trace_events.LoadEnded(0, self.version, {"copy": 0.001, "load": 0.002})
        yield LEARNER, trace_events.SpanBegan("wait broker", self.version)

    def death(self) -> Iterator[Told]:
        yield SUPERVISOR, trace_events.ProcessDied("generator", 0, 0, "killed by SIGKILL")
        yield SUPERVISOR, trace_events.AlarmShown("process-died", "generator.0 killed by SIGKILL")
        self.generators[0] = Source("generator", 0, 1)
        yield SUPERVISOR, trace_events.ProcessStarted("generator", 0, 1)


def write_trace(run: Path, events: int, seed: int = 0) -> int:
    """Write so many events in `<run>/trace`, whose folder must not exist yet. Returns how many."""
    (run / FOLDER).mkdir(parents=True)
    wall = time.time()
    boot = boot_id()
    with ExitStack() as stack:
        files = {}
        for number, (source, event) in zip(range(events), Life(seed), strict=False):
            at = STEP_S * number

            if source not in files:
                file = stack.enter_context((run / FOLDER / f"{source}{SUFFIX}").open("wb"))
                header = (source.role, source.index, source.incarnation, 0, wall, 0.0, boot)
                file.write(encode_record(at, trace_events.TraceHeader(FORMAT, *header)))
                files[source] = file

            files[source].write(encode_record(at, event))
    return events
