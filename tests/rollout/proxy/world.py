"""A world around the router, which checks every action against an independent book."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rl.wire.messages import ReportsLost, StillSampling, Usage
from rollout.proxy.actions import AbortAt, Action, Forget, GoOn, Rename, Reply, ReportFirstToken, SendTo
from rollout.proxy.core import ProxyCore
from rollout.proxy.state import KvAdmission

SEATS = 3
CONTEXT = 80


@dataclass
class Job:
    """A request as the world outside sees it."""

    client: str
    request_id: int
    session: int
    kind: str
    need: int
    priority: int
    answers: list[Reply] = field(default_factory=list)
    orphan: bool = False
    queued: bool = True
    sent: int = 0
    left: int = 0  # tokens that may be sampled


@dataclass
class FakeGenerator:
    incarnation: int
    kv_tokens: int
    running: dict[int, int] = field(default_factory=dict)  # key -> tokens sampled
    reported: dict[int, int] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # aborts
    delivered: dict[int, int] = field(default_factory=dict)


class World:
    """Drives the core and checks every action against an independent book."""

    def __init__(self, kv_admission: KvAdmission = "whole") -> None:
        self.kv_admission = kv_admission
        self.core = ProxyCore(max_deaths=4, kv_admission=kv_admission)
        self.now = 0.0
        self.generators: dict[int, FakeGenerator] = {}
        self.known: dict[int, int] = {}  # KV tokens of each one's last incarnation
        self.incarnations: Counter[int] = Counter()
        self.dead: list[tuple[int, int, int]] = []  # generator, incarnation, key: material for late messages
        self.jobs: dict[int, Job] = {}
        self.request_ids: Counter[str] = Counter()
        self.dead_clients: set[str] = set()
        self.usage: Counter[tuple[int, bool]] = Counter()
        self.expected_usage: Counter[tuple[int, bool]] = Counter()
        self.forgotten: set[int] = set()
        self.going_on: dict[int, int] = {}  # tokens kept of those that a dead generator ran
        self.lost: set[int] = set()  # with a connection, or the answer was
        self.mending = False

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case SendTo(index, key):
                    generator = self.generators[index]  # KeyError: sent to a dead generator
                    assert key not in self.forgotten and not self.jobs[key].answers
                    assert all(key not in each.running for each in self.generators.values())
                    assert not self.mending or key == self.first_in_line()
                    generator.running[key] = 0
                    self.jobs[key].queued = False
                    self.jobs[key].sent += 1
                    assert len(generator.running) <= SEATS
                    assert self.jobs[key].need <= generator.kv_tokens, "alone it would not come to its end"
                    if self.kv_admission == "whole":
                        assert sum(self.jobs[key].need for key in generator.running) <= generator.kv_tokens

                case AbortAt(index, key):
                    if key not in self.lost:  # of those it does not hurt to make sure
                        assert key in self.generators[index].running
                        assert self.mending or key not in self.generators[index].asked
                        self.generators[index].asked.add(key)

                case Reply() as reply:
                    job = self.jobs[reply.key]
                    assert (reply.client, reply.request_id) == (job.client, job.request_id)
                    assert not job.orphan
                    if "KV cache" in reply.error:
                        assert job.need > max(self.known.values())
                    job.answers.append(reply)
                    job.queued = False

                case Forget(key):
                    assert self.jobs[key].orphan and key not in self.forgotten
                    self.forgotten.add(key)
                    self.jobs[key].queued = False

                case GoOn(key, tokens):
                    assert not self.jobs[key].answers and self.going_on.pop(key) == tokens

                case Rename(key, new_key):
                    assert key in self.lost
                    self.jobs[new_key] = self.jobs.pop(key)
                    if key in self.going_on:
                        self.going_on[new_key] = self.going_on.pop(key)

                case ReportsLost():
                    assert self.mending
                case Usage(session, tokens, lost):
                    self.usage[session, lost] += tokens
                case ReportFirstToken(key, session):
                    assert self.jobs[key].kind == "train" and self.jobs[key].session == session

    def first_in_line(self) -> int | None:
        """By priority and key, of those that fit a generator which is up."""
        largest = max((generator.kv_tokens for generator in self.generators.values()), default=0)
        queue = [(job.priority, key) for key, job in self.jobs.items() if job.queued and job.need <= largest]
        return min(queue)[1] if queue else None

    def check_head(self) -> None:
        """No starvation, no idling: the first in the queue waits only while it fits nowhere.

        What fits only a generator that is dead keeps nobody waiting.
        """
        assert sum(job.queued for job in self.jobs.values()) == self.core.queue_depth
        key = self.first_in_line()
        if key is not None:
            whole = self.jobs[key].need
            loads = self.core.loads()
            for index, generator in self.generators.items():
                if self.kv_admission == "whole":
                    need = whole
                    reserved = sum(self.jobs[each].need for each in generator.running)
                    assert loads[index][1] == reserved
                else:
                    need = self.core._requests[key].need
                    reserved = loads[index][1]
                    assert need <= whole

                full = len(generator.running) == SEATS
                assert full or reserved + need > generator.kv_tokens or whole > generator.kv_tokens

    # Events, chosen by hypothesis through `pick`.

    def up(self, pick: random.Random) -> None:
        index = pick.randrange(4)
        if index not in self.generators:
            self.generators[index] = FakeGenerator(self.incarnations[index], pick.choice([60, 120]))
            self.incarnations[index] += 1
            self.do(self._hello(index))

    def _hello(self, index: int) -> list[Action]:
        generator = self.generators[index]
        self.known[index] = generator.kv_tokens
        return self.core.generator_up(self.now, index, generator.incarnation, generator.kv_tokens, SEATS, CONTEXT)

    def hello_again(self, pick: random.Random) -> None:
        if self.generators:
            assert self._hello(pick.choice(list(self.generators))) == []

    def die(self, pick: random.Random) -> None:
        if not self.generators:
            return
        index = pick.choice(list(self.generators))
        generator = self.generators.pop(index)
        self.dead += [(index, generator.incarnation, key) for key in generator.running]
        self._take_back(generator, generator.running)
        if pick.random() < 0.5:
            self.do(self.core.generator_died(self.now, index, generator.incarnation))
        else:  # the next incarnation says hello first
            self.generators[index] = FakeGenerator(self.incarnations[index], 120)
            self.incarnations[index] += 1
            self.do(self._hello(index))
            assert self.core.generator_died(self.now, index, generator.incarnation) == []

    def _take_back(self, generator: FakeGenerator, keys: Iterable[int]) -> None:
        for key in keys:
            self.jobs[key].queued = True
        for key in keys:
            job = self.jobs[key]
            tokens = generator.reported.get(key, 0)
            kept = min(generator.delivered.get(key, 0), job.left - 1)
            job.left -= kept
            if kept:
                self.going_on[key] = kept
            if job.kind == "train":
                self.expected_usage[job.session, False] += kept
                self.expected_usage[job.session, True] += tokens - kept

    def cut(self, pick: random.Random) -> None:
        """A connection breaks and is made again: requests or answers are lost, and the generator says what it holds."""
        if not self.generators:
            return
        index = pick.choice(list(self.generators))
        generator = self.generators[index]
        lost = [key for key in generator.running if pick.random() < 0.5]
        self._take_back(generator, lost)
        for key in lost:
            del generator.running[key]
            generator.reported.pop(key, None)
            self.dead.append((index, generator.incarnation, key))

        self.lost.update(lost)
        self.lost.add(123_456)  # which it holds, and nobody knows
        self.mending = True
        requests = [*generator.running, 123_456]
        self.do(self.core.generator_again(self.now, index, generator.incarnation, requests))
        self.mending = False
        assert self.core.generator_again(self.now, index, generator.incarnation + 1, []) == []

    def add(self, pick: random.Random) -> None:
        client = pick.choice("abc")
        prompt_len, max_tokens = pick.choice([(4, 4), (20, 20), (10, 40), (50, 20)])
        kind = pick.choice(["train", "train", "eval"])
        priority = pick.randrange(3)
        job = Job(client, self.request_ids[client], pick.randrange(8), kind, prompt_len + max_tokens, priority)
        job.left = max_tokens
        self.request_ids[client] += 1
        key = self.core.next_key
        self.jobs[key] = job

        actions = self.core.add(
            self.now,
            client,
            job.request_id,
            session=job.session,
            kind=job.kind,
            prompt_len=prompt_len,
            max_tokens=max_tokens,
            priority=priority,
            prompt_hash=pick.choice([None, 1, 2]),
        )
        if client in self.dead_clients:
            assert actions == [] and self.core.next_key == key
            del self.jobs[key]
        self.do(actions)

    def abort(self, pick: random.Random) -> None:
        open_jobs = [job for job in self.jobs.values() if not job.answers and not job.orphan]
        if open_jobs:
            job = pick.choice(open_jobs)
            self.do(self.core.abort(self.now, job.client, job.request_id))
        assert self.core.abort(self.now, "a", 10_000) == []

    def client_dies(self, pick: random.Random) -> None:
        if pick.random() < 0.2:
            client = pick.choice("abc")
            self.dead_clients.add(client)
            for job in self.jobs.values():
                job.orphan |= job.client == client and not job.answers
            self.do(self.core.client_died(self.now, client))

    def sample(self, pick: random.Random) -> None:
        """Every generator moves on; it reports first tokens at once, counts in its status."""
        for index, generator in self.generators.items():
            for key in generator.running:
                generator.running[key] += pick.randrange(5)
                if generator.running[key] and not generator.reported.get(key):
                    generator.reported[key] = 1
                    self.do(self.core.first_token(self.now, index, generator.incarnation, key))
            running = dict(generator.running)
            grown = any(tokens > generator.reported.get(key, 0) for key, tokens in running.items())
            generator.reported |= {key: tokens for key, tokens in running.items() if tokens}
            actions = self.core.status(self.now, index, generator.incarnation, running, pick.choice("vw"))
            assert actions == ([StillSampling()] if grown else [])
            for key, tokens in generator.running.items():
                if tokens and pick.random() < 0.5:
                    generator.delivered[key] = pick.randrange(generator.delivered.get(key, 0), tokens + 1)
                    self.core.delivered(key, generator.delivered[key])

    def finish(self, pick: random.Random) -> None:
        busy = [index for index, generator in self.generators.items() if generator.running]
        if not busy:
            return
        index = pick.choice(busy)
        generator = self.generators[index]
        key = pick.choice(list(generator.running))
        self._finish(index, key, pick.choice(["stop", "length"]))

    def _finish(self, index: int, key: int, reason: str) -> None:
        generator = self.generators[index]
        tokens = generator.running.pop(key)
        generator.reported.pop(key, None)
        if self.jobs[key].kind == "train":
            self.expected_usage[self.jobs[key].session, False] += tokens
        if key in generator.asked:
            reason = "abort"
        self.do(self.core.finished(self.now, index, generator.incarnation, key, tokens, reason))
        assert self.core.finished(self.now, index, generator.incarnation, key, tokens, reason) == []

    def late(self, pick: random.Random) -> None:
        """What a dead incarnation had in flight changes nothing."""
        if self.dead:
            index, incarnation, key = pick.choice(self.dead)
            assert self.core.finished(self.now, index, incarnation, key, 7, "stop") == []
            assert self.core.first_token(self.now, index, incarnation, key) == []
            assert self.core.status(self.now, index, incarnation, {key: 9}) == []
            assert self.core.generator_up(self.now, index, incarnation, 120, SEATS, CONTEXT) == []

    def settle(self) -> None:
        """Generators come up and answer all they hold: everything must end, in bounded time."""
        for index in range(4):
            if index not in self.generators:
                self.generators[index] = FakeGenerator(self.incarnations[index], 120)
                self.do(self._hello(index))
        for _ in range(2 * len(self.jobs) + 1):
            for index, generator in self.generators.items():
                for key in list(generator.running):
                    self._finish(index, key, "stop")
        assert self.core.live_requests == 0 and self.core.queue_depth == 0 and self.core.in_flight == 0
        assert all(load == (0, 0, 0) for load in self.core.loads().values())
