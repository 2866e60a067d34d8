"""How samples are shared among ranks, and the order of one server's messages."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rl.wire.messages import Ticket, Turn, Version
from rollout.broker.actions import BatchSample, EmitBatch
from rollout.broker.assembly import balance, make_batch_parts, outcome_of
from rollout.broker.intake import Reorder
from tests.rollout.trajectories import make_trajectory, with_sequence

GOOD = make_trajectory(Ticket(2, 1, 0, 0, Version(0, 3)), 1, 1.0)


def test_every_rank_knows_the_rewards_of_every_turn_and_who_was_cut() -> None:
    turns = [Turn(2, 4, 0.25, 0.0, 0.0, "stop", 0), Turn(4, 6, 0.5, 0.0, 0.0, "length", 0)]
    cut = replace(with_sequence(GOOD, turns), reward=0.75, stop_reason="length")
    samples = [BatchSample(i, 0, 0, 3, outcome_of(one)) for i, one in enumerate((GOOD, cut))]
    for rank, batch_part in enumerate(make_batch_parts(EmitBatch(5, samples, {}), timeline=0, ranks=2)):
        assert len(batch_part.members) == 1 and batch_part.rank == rank
        assert [row.turn_rewards for row in batch_part.rows] == [[1.0], [0.25, 0.5]]
        assert [row.truncated for row in batch_part.rows] == [False, True]
        assert batch_part.turn_starts == [[2] if batch_part.members == [0] else [2, 4]]


def test_a_row_has_the_age_of_its_sample_and_not_that_of_its_group() -> None:
    one = outcome_of(GOOD)
    samples = [BatchSample(0, 0, 0, 2, replace(one, version=2)), BatchSample(1, 0, 0, 2, one)]
    (batch_part,) = make_batch_parts(EmitBatch(5, samples, {}), timeline=0, ranks=1)
    assert [row.version for row in batch_part.rows] == [2, 3]


def test_success_is_what_the_environment_said_and_not_a_positive_reward() -> None:
    assert outcome_of(replace(GOOD, reward=0.125, success=False)).success == 0
    assert outcome_of(replace(GOOD, reward=0.0, success=True)).success == 1


def test_turns_that_answer_the_same_observation_have_one_state() -> None:
    first = [Turn(2, 3, 0.0, 0.0, 0.0, "stop", 0), Turn(5, 6, 1.0, 0.0, 0.0, "stop", 0)]
    one = with_sequence(GOOD, first, token_ids=np.array([7, 8, 50, 3, 4, 51], np.int32))
    # The other one begins where the first one's second turn is.
    other = with_sequence(one, token_ids=np.array([3, 4, 60, 9, 9, 61], np.int32))
    samples = [BatchSample(i, 0, 0, 3, outcome_of(trajectory)) for i, trajectory in enumerate((one, other))]
    (batch_part,) = make_batch_parts(EmitBatch(5, samples, {}), timeline=0, ranks=1)
    (prompt, answer), (again, elsewhere) = (row.turn_states for row in batch_part.rows)
    assert again == answer and len({prompt, answer, elsewhere}) == 3


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_ranks_are_balanced(tokens: list[int], ranks: int) -> None:
    shares = balance(tokens, ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(tokens)))
    assert shares == balance(tokens, ranks)
    if len(tokens) >= ranks:
        assert all(shares)
    loads = [sum(tokens[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(tokens)


@given(st.integers(1, 30), st.integers(0, 2**32))
def test_messages_come_out_in_order_and_once(count: int, seed: int) -> None:
    arrivals = [*range(count), *range(count)]
    random.Random(seed).shuffle(arrivals)
    order: Reorder[int] = Reorder()
    out = [message for seq in arrivals for message in order.push(seq, seq)]
    assert out == list(range(count))
    assert order.duplicates == count and order.waiting == 0


def test_an_absurd_number_is_refused() -> None:
    with pytest.raises(ValueError, match="message 101 while 0 is awaited"):
        Reorder[None](limit=100).push(101, None)


def test_ranks_that_compute_together_get_the_same_samples() -> None:
    samples = [BatchSample(i, 0, 0, 3, outcome_of(GOOD)) for i in range(3)]
    batch = EmitBatch(5, samples, {})
    parts = make_batch_parts(batch, timeline=0, ranks=4, together=2)
    apart = make_batch_parts(batch, timeline=0, ranks=2)
    assert [part.rank for part in parts] == [0, 1, 2, 3]
    assert [part.members for part in parts] == [each.members for each in apart for _ in range(2)]
    assert sum(part.members != [] for part in apart) == 2
