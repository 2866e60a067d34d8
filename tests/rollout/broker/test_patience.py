"""The deadline of a batch follows what is sampled for it, for the broker as for the learner that only hears of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollout.broker.deadlines import Patience


def test_it_ends_a_deadline_after_the_last_token() -> None:
    patience = Patience(10, now=0)
    patience.advanced(8)
    assert not patience.has_run_out(asked=1, now=18)
    assert patience.has_run_out(asked=1, now=18.1)


def test_the_wait_begins_when_the_learner_asks() -> None:
    patience = Patience(10, now=0)
    assert not patience.has_run_out(asked=50, now=60)
    assert patience.has_run_out(asked=50, now=60.1)


def test_who_hears_of_nothing_is_told_nothing() -> None:
    patience = Patience(10, now=0)
    assert not any(patience.must_be_told(now) for now in range(100))


@given(st.lists(st.floats(0, 40, allow_nan=False), min_size=1))
def test_the_learner_gives_up_when_the_broker_does_and_not_before(moments: list[float]) -> None:
    """Both have waited since 0. The learner knows only what it is told, at the turns of the broker's loop."""
    patience = Patience(10, now=0)
    heard = 0.0
    advanced = sorted(moments)

    for tick in range(600):
        now = tick / 10
        while advanced and advanced[0] <= now:
            advanced.pop(0)
            patience.advanced(now)
        if patience.must_be_told(now):
            heard = now
        if now - heard > 10:
            assert patience.has_run_out(asked=0, now=now)
            return
    raise AssertionError("the learner waits for ever")
