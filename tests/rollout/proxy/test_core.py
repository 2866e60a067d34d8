"""The router: invariants under random interleavings, and the decisions it is there for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


EVENTS = (*3 * ["add"], *2 * ["finish"], "up", "hello_again", "die", "cut", "abort", "client_dies", "sample", "late")


@settings(max_examples=250)
@pytest.mark.parametrize("kv_admission", ["whole", "expected"])
@given(st.lists(st.sampled_from(EVENTS), max_size=120), st.randoms(use_true_random=False))
def test_every_request_ends_once_under_any_interleaving(
    kv_admission: KvAdmission, events: list[str], pick: random.Random
) -> None:
    world = World(kv_admission)
    for event in events:
        world.now += 0.5
        getattr(world, event)(pick)
        world.check_head()
    world.settle()

    for key, job in world.jobs.items():
        if job.orphan:
            assert key in world.forgotten and not job.answers
        else:
            assert len(job.answers) == 1, job
            if job.answers[0].finish_reason == "error":
                assert job.need > CONTEXT or job.sent >= 4 or "KV cache" in job.answers[0].error
            assert job.need <= CONTEXT or job.sent == 0
    assert +world.usage == +world.expected_usage


def core_with(generators: int, seats: int = 8, kv_tokens: int = 10_000) -> ProxyCore:
    core = ProxyCore()
    for index in range(generators):
        assert core.generator_up(0.0, index, 0, kv_tokens, seats, 4000) == []
    return core


def add(core: ProxyCore, request_id: int, **meta: int) -> list[Action]:
    values = {"session": request_id, "prompt_len": 100, "max_tokens": 50} | meta
    return core.add(0.0, "client", request_id, kind="train", **values)


def sent_to(actions: list[Action]) -> int:
    (action,) = [action for action in actions if isinstance(action, SendTo)]
    return action.generator


def test_a_request_that_was_lost_and_renamed_goes_behind_those_that_wait() -> None:
    core = core_with(1, seats=2)
    sent = [sent_to(add(core, request_id)) for request_id in (1, 2)]
    assert sent == [0, 0] and add(core, 3) == add(core, 4) == []  # they wait

    again = core.generator_again(1.0, 0, 0, [])  # it holds neither: both have new keys
    assert [each for each in again if isinstance(each, Rename)] == [Rename(1, 5), Rename(2, 6)]
    assert [each.key for each in again if isinstance(each, SendTo)] == [3, 4]


def test_replicas_of_a_prompt_spread_over_idle_generators() -> None:
    core = core_with(4)
    places = [sent_to(add(core, i, prompt_hash=7)) for i in range(8)]
    assert Counter(places) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_replicas_of_a_long_prompt_share_its_prefill() -> None:
    """Once it is done, prefilling 1 000 tokens elsewhere costs more than standing behind 10."""
    core = core_with(2)
    assert sent_to(add(core, 1, prompt_hash=7, prompt_len=1000, max_tokens=10)) == 0
    core.first_token(0.0, 0, 0, 1)
    assert sent_to(add(core, 2, prompt_hash=7, prompt_len=1000, max_tokens=10)) == 0


def turn(core: ProxyCore, request_id: int, generator: int, tokens: int) -> None:
    core.first_token(0.0, generator, 0, request_id)
    core.finished(0.0, generator, 0, request_id, tokens, "stop")


def test_a_session_stays_where_its_context_is_cached() -> None:
    core = core_with(3)
    add(core, 1, session=1)
    home = sent_to(add(core, 2, session=2))
    assert home == 1
    turn(core, 2, home, tokens=20)
    # 30 new tokens and the work of an average response on the home generator, against all 150 elsewhere.
    add(core, 3, session=3)
    assert sent_to(add(core, 4, session=2, prompt_len=150)) == home


def test_a_session_leaves_when_its_generator_is_loaded_more_than_its_context_costs() -> None:
    core = core_with(2)
    assert sent_to(add(core, 1, session=1)) == 0
    turn(core, 1, 0, tokens=20)
    assert sent_to(add(core, 2, session=2, prompt_len=3000, max_tokens=900)) == 0
    assert sent_to(add(core, 3, session=1, prompt_len=150)) == 1


def test_a_session_leaves_when_its_generator_has_no_room() -> None:
    core = core_with(2, kv_tokens=1000)
    assert sent_to(add(core, 1, session=1, prompt_len=40)) == 0
    turn(core, 1, 0, tokens=20)
    assert sent_to(add(core, 2, session=2, prompt_len=10, max_tokens=900)) == 0
    core.status(0.0, 0, 0, {2: 19})  # nearly done, as responses have 20 tokens on average
    assert sent_to(add(core, 3, session=1, prompt_len=60, max_tokens=30)) == 0  # 1 000 tokens reserved: full
    core.finished(0.0, 0, 0, 3, 20, "stop")
    assert sent_to(add(core, 4, session=1, prompt_len=61, max_tokens=30)) == 1


def test_a_weight_update_empties_the_cache_unless_it_is_kept() -> None:
    for survives in (False, True):
        core = ProxyCore(cache_survives_update=survives)
        for index in range(2):
            core.generator_up(0.0, index, 0, 10_000, 8, 4000)
            core.status(0.0, index, 0, {}, "version 0")
        add(core, 1, session=1)
        turn(core, 1, 0, tokens=20)
        core.status(0.0, 0, 0, {}, "version 1")
        assert sent_to(add(core, 2, session=2)) == 0  # makes generator 0 the more loaded one
        core.first_token(0.0, 0, 0, 2)
        assert sent_to(add(core, 3, session=1, prompt_len=150)) == (0 if survives else 1)


def test_the_queue_is_served_by_priority_then_arrival() -> None:
    core = core_with(1, seats=1)
    add(core, 0)
    for request_id, priority in ((1, 5), (2, 3), (3, 5), (4, 3)):
        assert add(core, request_id, priority=priority) == []
    order = []
    key = 1
    for _ in range(4):
        (key,) = [action.key for action in core.finished(0.0, 0, 0, key, 5, "stop") if isinstance(action, SendTo)]
        order.append(key)
    assert order == [3, 5, 2, 4]  # keys: request id + 1


def test_a_request_sent_again_keeps_its_place() -> None:
    core = core_with(1, seats=1)
    add(core, 0)
    add(core, 1)
    assert core.generator_died(1.0, 0, 0) == []
    assert core.generator_up(2.0, 0, 1, 10_000, 1, 4000) == [SendTo(0, 1)]


def test_a_large_request_is_not_passed_by_small_ones() -> None:
    core = core_with(1, kv_tokens=1000)
    add(core, 1, prompt_len=500, max_tokens=100)
    assert add(core, 2, prompt_len=500, max_tokens=100) == []
    assert add(core, 3, prompt_len=50, max_tokens=10) == []
    actions = core.finished(0.0, 0, 0, 1, 100, "length")
    assert [action.key for action in actions if isinstance(action, SendTo)] == [2, 3]


def test_cached_turns_pass_the_head_a_bounded_number_of_times() -> None:
    core = ProxyCore(max_overtakes=2)
    core.generator_up(0.0, 0, 0, 10_000, 1, 4000)
    for session in range(5):
        add(core, session, session=session)
    for key in range(1, 6):
        core.finished(0.0, 0, 0, key, 10, "stop")

    add(core, 10, session=0, prompt_len=200)  # runs: key 6
    add(core, 11, session=99)  # head, not cached: key 7
    for request_id in range(12, 16):
        add(core, request_id, session=request_id - 11, prompt_len=200)  # cached: keys 8 to 11

    order = []
    key = 6
    for _ in range(5):
        (key,) = [a.key for a in core.finished(0.0, 0, 0, key, 10, "stop") if isinstance(a, SendTo)]
        order.append(key)
    assert order == [8, 9, 7, 10, 11]


@pytest.mark.parametrize(
    ("meta", "text"),
    [
        ({"prompt_len": 3990, "max_tokens": 50}, "generator.max_model_len of 4000"),
        ({"prompt_len": 2000, "max_tokens": 1500}, "KV cache of 3000"),
        ({"max_tokens": 0}, "empty request"),
    ],
)
def test_what_can_never_fit_is_answered_at_once(meta: dict[str, int], text: str) -> None:
    core = core_with(2, kv_tokens=3000)
    (reply,) = add(core, 1, **meta)
    assert isinstance(reply, Reply) and reply.finish_reason == "error" and text in reply.error
    assert core.live_requests == 0


def test_what_fits_only_a_dead_generator_keeps_nobody_waiting() -> None:
    core = core_with(1, kv_tokens=1000)
    core.generator_up(0.0, 1, 0, 3000, 8, 4000)
    assert core.generator_died(0.0, 1, 0) == []
    assert add(core, 1, prompt_len=1500, max_tokens=100) == []  # key 1
    assert add(core, 2, prompt_len=500, max_tokens=100) == [SendTo(0, 2)]
    assert add(core, 3, prompt_len=1500, max_tokens=100) == []
    assert core.queue_depth == 2
    core.abort(0.0, "client", 3)
    assert core.generator_up(0.0, 1, 1, 3000, 8, 4000) == [SendTo(1, 1)]


def test_abort_of_a_queued_request_answers_at_once_and_in_flight_when_the_generator_does() -> None:
    core = core_with(1, seats=1)
    add(core, 1)
    add(core, 2)
    (reply,) = core.abort(0.0, "client", 2)
    assert isinstance(reply, Reply) and (reply.request_id, reply.finish_reason, reply.forward) == (2, "abort", False)
    assert core.abort(0.0, "client", 1) == [AbortAt(0, 1)]
    assert core.abort(0.0, "client", 1) == []
    usage, reply = core.finished(0.0, 0, 0, 1, 9, "abort")
    assert usage == Usage(1, 9, lost=False)
    assert isinstance(reply, Reply) and reply.forward and reply.finish_reason == "abort"


def test_abort_on_a_dying_generator_answers_empty_and_reports_what_was_lost() -> None:
    core = core_with(1)
    add(core, 1)
    core.status(0.0, 0, 0, {1: 12})
    core.abort(0.0, "client", 1)
    usage, reply = core.generator_died(0.0, 0, 0)
    assert usage == Usage(1, 12, lost=True)
    assert isinstance(reply, Reply) and (reply.finish_reason, reply.forward) == ("abort", False)


def test_tokens_lost_twice_are_counted_twice_and_no_more() -> None:
    core = core_with(1)
    add(core, 1)
    core.status(0.0, 0, 0, {1: 12})
    lost = core.generator_died(0.0, 0, 0)
    core.generator_up(0.0, 0, 1, 1000, 4, 1000)
    lost += core.generator_died(0.0, 0, 1)  # before it sampled anything
    core.generator_up(0.0, 0, 2, 1000, 4, 1000)
    core.status(0.0, 0, 2, {1: 5})
    lost += core.generator_died(0.0, 0, 2)
    assert [each.tokens for each in lost if isinstance(each, Usage)] == [12, 5]


def test_a_request_goes_on_behind_what_was_delivered() -> None:
    core = core_with(2)
    (sent,) = add(core, 1, prompt_len=100, max_tokens=20)
    assert isinstance(sent, SendTo)
    core.first_token(0.0, sent.generator, 0, 1)
    core.status(0.0, sent.generator, 0, {1: 12})
    core.delivered(1, 8)
    on, kept, lost, again = core.generator_died(0.0, sent.generator, 0)
    assert on == GoOn(1, 8)
    assert (kept, lost) == (Usage(1, 8, lost=False), Usage(1, 4, lost=True))
    assert again == SendTo(1 - sent.generator, 1)
    assert core.first_token(0.0, 1 - sent.generator, 0, 1) == [], "v(sample) is that of its first token"


def test_an_abort_at_the_head_of_the_queue_lets_the_next_one_go() -> None:
    core = core_with(1, kv_tokens=1000)
    add(core, 1, prompt_len=500, max_tokens=100)
    assert add(core, 2, prompt_len=500, max_tokens=100) == []
    assert add(core, 3, prompt_len=50, max_tokens=10) == []
    assert [type(action) for action in core.abort(0.0, "client", 2)] == [Reply, SendTo]


def test_a_request_that_keeps_killing_generators_is_given_up() -> None:
    core = ProxyCore(max_deaths=3)
    core.generator_up(0.0, 0, 0, 1000, 4, 1000)
    add(core, 1)
    for incarnation in range(2):
        core.generator_died(0.0, 0, incarnation)
        assert core.generator_up(0.0, 0, incarnation + 1, 1000, 4, 1000) == [SendTo(0, 1)]
    (reply,) = core.generator_died(0.0, 0, 2)
    assert isinstance(reply, Reply) and reply.error == "3 generators died running this request"


def test_first_tokens_are_reported_for_first_turns_of_training_sessions() -> None:
    core = core_with(1)
    add(core, 1, session=5)
    assert core.first_token(0.0, 0, 0, 1) == [ReportFirstToken(1, 5)]
    core.finished(0.0, 0, 0, 1, 4, "stop")
    add(core, 2, session=5)
    assert core.first_token(0.0, 0, 0, 2) == []
    core.add(0.0, "client", 3, session=6, kind="eval", prompt_len=4, max_tokens=4)
    assert core.first_token(0.0, 0, 0, 3) == []


def test_pinned_prompts_wait_for_their_generator_while_another_is_free() -> None:
    """The baseline without prompt replication; a generator's death releases its prompts."""
    for pinned, expected in ((True, {0: 6}), (False, {0: 3, 1: 3})):
        core = ProxyCore(hooks=["pin_prompts"] if pinned else [])
        for index in range(2):
            core.generator_up(0.0, index, 0, 10_000, 4, 1000)

        sent: Counter[int] = Counter()
        for request_id in range(6):
            actions = core.add(
                0.0, "a", request_id, session=request_id, kind="train", prompt_len=10, max_tokens=100, prompt_hash=5
            )
            sent.update(action.generator for action in actions if isinstance(action, SendTo))

        first = 0 if sent[0] else 1
        assert sorted(sent.values()) == sorted(expected.values())
        moved = [a.generator for a in core.generator_died(1.0, first, 0) if isinstance(a, SendTo)]
        assert set(moved) == {1 - first}


def test_the_mean_response_is_reserved_and_more_as_it_grows() -> None:
    core = ProxyCore(kv_admission="expected")
    core.generator_up(0.0, 0, 0, 1000, 8, 4000)
    assert sent_to(add(core, 1, prompt_len=100, max_tokens=800)) == 0
    assert add(core, 2, prompt_len=100, max_tokens=800) == []  # nothing is known: each may need 900
    core.finished(0.0, 0, 0, 1, 100, "stop")
    for request_id in (3, 4, 5, 6):
        add(core, request_id, prompt_len=100, max_tokens=800)
    assert core.loads()[0][1:] == (1000, 5)  # prompt and mean: 200 each

    core.status(0.0, 0, 0, {2: 100, 3: 80})
    assert core.loads()[0][1] == 1000
    core.status(0.0, 0, 0, {2: 400})
    assert core.loads()[0][1] == 1400  # the engine pre-empts what does not fit
    core.finished(0.0, 0, 0, 2, 500, "stop")
    assert core.loads()[0][1:] == (800, 4)


def test_a_request_goes_only_where_it_would_fit_alone() -> None:
    core = ProxyCore(kv_admission="expected")
    core.generator_up(0.0, 0, 0, 300, 8, 4000)
    core.generator_up(0.0, 1, 0, 1000, 8, 4000)
    assert sent_to(add(core, 1, prompt_len=100, max_tokens=800)) == 1
    core.finished(0.0, 1, 0, 1, 10, "stop")
    assert sent_to(add(core, 2, prompt_len=100, max_tokens=800)) == 1  # 110 tokens would fit into generator 0
