"""The router: invariants under random interleavings, and the decisions it is there for."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.wire.messages import Usage
from rollout.proxy.actions import AbortAt, Action, GoOn, Rename, Reply, ReportFirstToken, SendTo
from rollout.proxy.core import ProxyCore
from rollout.proxy.state import KvAdmission
from tests.rollout.proxy.world import CONTEXT, World

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
