"""A response that several generators sampled is one response to its client."""

from __future__ import annotations

import numpy as np
import pytest

from rl.wire.messages import Generate, ProtocolError, Version
from rollout.proxy.continuations import Continuations
from tests.rollout.trajectories import reply_columns

KEY = 7


def request(gate: int = 3, seed: int | None = None) -> Generate:
    return Generate(KEY, 1, "train", Version(2, gate), np.arange(20, dtype="<i4"), 30, 1.0, 1.0, [2], seed=seed)


def test_two_deaths_and_an_answer() -> None:
    continuations = Continuations()
    continuations.sent(KEY)
    assert continuations.deliver(KEY, 0, reply_columns(range(100, 104), -0.5, 3)) == 4
    assert continuations.deliver(KEY, 4, reply_columns(range(104, 109), -0.6, 5)) == 9

    second = continuations.go_on(request(), 8)  # the core keeps one token less than there may be
    assert second.prompt_ids.tolist() == [*range(20), *range(100, 108)] and second.max_tokens == 22
    assert second.version == Version(2, 5), "versions never go backwards inside a response"

    continuations.sent(KEY)
    assert continuations.deliver(KEY, 0, reply_columns(range(200, 203), -0.7, 6)) == 3
    third = continuations.go_on(second, 3)
    assert (third.prompt_ids.size, third.max_tokens, third.version) == (31, 19, Version(2, 6))

    continuations.sent(KEY)
    columns, _, kept = continuations.answer(KEY, reply_columns([300], -0.8, 7), {})
    assert kept == 11 and columns["token_ids"].tolist() == [*range(100, 108), 200, 201, 202, 300]
    assert columns["policy_version"].tolist() == [3] * 4 + [5] * 4 + [6] * 3 + [7]
    assert columns["logp_behavior"].tolist() == pytest.approx([-0.5] * 4 + [-0.6] * 4 + [-0.7] * 3 + [-0.8])
    assert continuations.answer(KEY, columns, {})[2] == 0, "it is over"


def test_what_began_again_replaces_what_was_delivered() -> None:
    continuations = Continuations()
    continuations.deliver(KEY, 0, reply_columns(range(9), -0.5, 3))
    assert continuations.deliver(KEY, 0, reply_columns(range(50, 54), -0.5, 4)) == 4
    assert continuations.go_on(request(), 4).prompt_ids[20:].tolist() == [50, 51, 52, 53]


def test_the_random_numbers_are_others() -> None:
    continuations = Continuations()
    continuations.deliver(KEY, 0, reply_columns(range(9), -0.5, 3))
    assert continuations.go_on(request(seed=5), 9).seed not in (None, 5)


def test_tokens_that_do_not_follow_are_refused() -> None:
    continuations = Continuations()
    continuations.deliver(KEY, 0, reply_columns(range(4), -0.5, 3))
    for start, columns in [
        (5, reply_columns(range(4), -0.5, 3)),
        (4, reply_columns(range(4), -0.5, 3) | {"logp_behavior": np.zeros(3, np.float32)}),
        (4, {"token_ids": np.zeros(3, np.int32)}),
    ]:
        with pytest.raises(ProtocolError, match="do not follow"):
            continuations.deliver(KEY, start, columns)
    assert continuations.go_on(request(), 4).prompt_ids.size == 24
