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

from rl.core import moments
from rl.core.trace import FOLDER, FORMAT, SUFFIX, Source, boot_id, record

GENERATORS = 4
SERVERS = 4
LANES = 32  # episodes of a server
BATCH = 64  # tickets
TURNS = 4
STEP_S = 0.001  # from one event to the next, of whatever process

Told = tuple[Source, moments.Moment]
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
        yield LEARNER, moments.SpanBegan("wait broker", 0)
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
            yield BROKER, moments.Issued(ticket, "train", group, member, group % 500, self.version, 0, server.index)
            yield server, moments.ResetBegan(ticket)
            yield server, moments.ResetEnded(ticket)
            for turn in range(1, TURNS + 1):
                yield from self.turn(server, ticket, turn)

            reward = self.random.random()
            yield server, moments.EpisodeEnded(ticket, "done", TURNS, 20 * TURNS, reward, reward > 0.5)
            yield BROKER, moments.Delivered(ticket, 20 * TURNS)
            if self.random.random() < 0.05:
                yield BROKER, moments.TicketEnded(ticket, "stale")
            else:
                self.delivered.append(ticket)

    def turn(self, server: Source, ticket: int, turn: int) -> Iterator[Told]:
        request = self.requests
        self.requests += 1
        generator = self.random.choice(self.generators)
        yield server, moments.Requested(ticket, turn, 100 * turn)
        yield generator, moments.SamplingBegan(ticket, request, 0.0)
        yield generator, moments.FirstToken(ticket, request, self.version)
        yield generator, moments.SamplingEnded(ticket, request, 20, "stop")
        yield generator, moments.EngineState(self.random.randrange(LANES), 0, 20 * request, self.version)
        yield server, moments.Answered(ticket, turn, generator.index, 20, "stop")
        yield server, moments.StepBegan(ticket, turn)
        yield server, moments.StepEnded(ticket, turn, 0.0)

    def step(self, tickets: list[int]) -> Iterator[Told]:
        yield BROKER, moments.Batched(self.version, tuple(tickets))
        yield LEARNER, moments.SpanEnded("wait broker", self.version)
        yield LEARNER, moments.SpanBegan("train", self.version)
        yield LEARNER, moments.SpanEnded("train", self.version)
        self.version += 1
        yield LEARNER, moments.Published(0, self.version)
        for ticket in tickets:
            yield BROKER, moments.TicketEnded(ticket, "trained")

        if self.version == 3:
            yield from self.death()
        for generator in self.generators:
            yield generator, moments.LoadBegan(0, self.version)
            yield generator, moments.LoadEnded(0, self.version, {"copy": 0.001, "load": 0.002})
        yield LEARNER, moments.SpanBegan("wait broker", self.version)

    def death(self) -> Iterator[Told]:
        yield SUPERVISOR, moments.ProcessDied("generator", 0, 0, "killed by SIGKILL")
        yield SUPERVISOR, moments.AlarmShown("process-died", "generator.0 killed by SIGKILL")
        self.generators[0] = Source("generator", 0, 1)
        yield SUPERVISOR, moments.ProcessStarted("generator", 0, 1, 4711)


def write_trace(run: Path, events: int, seed: int = 0) -> int:
    """So many events in `<run>/trace`, whose folder must not exist yet. Returns how many."""
    (run / FOLDER).mkdir(parents=True)
    wall = time.time()
    boot = boot_id()
    with ExitStack() as stack:
        files = {}
        for number, (source, moment) in zip(range(events), Life(seed), strict=False):
            at = STEP_S * number

            if source not in files:
                file = stack.enter_context((run / FOLDER / f"{source}{SUFFIX}").open("wb"))
                header = (source.role, source.index, source.incarnation, 0, wall, 0.0, boot)
                file.write(record(at, moments.TraceHeader(FORMAT, *header)))
                files[source] = file

            files[source].write(record(at, moment))
    return events
