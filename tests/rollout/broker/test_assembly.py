"""What must hold of a trajectory, how samples are shared among ranks, and the order of one server's messages."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rl.core.messages import Ticket, Turn, Version
from rollout.broker.actions import BatchSample, EmitBatch
from rollout.broker.assembly import balance, fault, make_shards, outcome_of
from rollout.broker.reorder import Reorder
from tests.rollout.trajectories import make_trajectory, with_sequence

GOOD = make_trajectory(Ticket(2, 1, 0, 0, Version(0, 3)), 1, 1.0)


def test_a_good_trajectory_has_no_fault() -> None:
    assert fault(GOOD) == ""


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"loss_mask": np.ones(3, np.uint8)}, "loss_mask is uint8(3,)"),
        ({"loss_mask": np.full(6, 2, np.uint8)}, "other than 0 and 1"),
        ({"policy_version": np.zeros(6, np.float32)}, "policy_version is float32"),
        ({"token_ids": np.zeros((2, 3), np.int32)}, "token_ids is"),
        ({"logp_behavior": np.full(6, np.nan, np.float32)}, "logp_behavior is not finite"),
        ({"logp_behavior": np.array([0, 0, 0, np.inf, -np.inf, 0], np.float32)}, "logp_behavior is not finite"),
        ({"policy_version": np.full(6, -1, np.int32)}, "without a policy version"),
        ({"turns": [Turn(2, 9, 0.0, 0.0, 0.0, "stop", 0)]}, "turn [2, 9)"),
        ({"turns": [Turn(2, 4, 0.0, 0.0, 0.0, "stop", 0), Turn(3, 6, 0.0, 0.0, 0.0, "stop", 0)]}, "turn [3, 6)"),
    ],
)
def test_faults_of_a_sequence_are_named(change: dict[str, Any], what: str) -> None:
    assert what in fault(with_sequence(GOOD, **change))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokens_generated": 3}, "4 tokens in the loss mask, 3 generated"),
        ({"reward": float("nan")}, "reward nan"),
        ({"sequences": []}, "0 sequences"),
        ({"sequences": GOOD.sequences * 2}, "2 sequences"),
        ({"columns": {"grade": np.zeros(1, np.float32)}}, "column 'grade' is not registered"),
    ],
)
def test_faults_of_a_trajectory_are_named(change: dict[str, Any], what: str) -> None:
    assert what in fault(replace(GOOD, **change))


def test_a_column_that_is_missing_or_unknown_is_named() -> None:
    sequence = GOOD.sequence
    without = {name: values for name, values in sequence.columns.items() if name != "logp_behavior"}
    assert "'logp_behavior' is missing" in fault(replace(GOOD, sequences=[replace(sequence, columns=without)]))

    unknown = with_sequence(GOOD, teacher_logp=np.zeros(6, np.float32))
    assert fault(unknown).startswith("column 'teacher_logp' is not registered") and "algo.columns" in fault(unknown)
    learners = with_sequence(GOOD, logp_reference=np.zeros(6, np.float32))  # never crosses a socket
    assert "'logp_reference' is not registered for this place" in fault(learners)


def test_every_rank_knows_the_rewards_of_every_turn_and_who_was_cut() -> None:
    turns = [Turn(2, 4, 0.25, 0.0, 0.0, "stop", 0), Turn(4, 6, 0.5, 0.0, 0.0, "length", 0)]
    cut = replace(with_sequence(GOOD, turns), reward=0.75, stop_reason="length")
    samples = [BatchSample(i, 0, 0, 3, outcome_of(one)) for i, one in enumerate((GOOD, cut))]
    for rank, shard in enumerate(make_shards(EmitBatch(5, samples, {}), epoch=0, ranks=2)):
        assert len(shard.members) == 1 and shard.rank == rank
        assert [row.turn_rewards for row in shard.rows] == [[1.0], [0.25, 0.5]]
        assert [row.truncated for row in shard.rows] == [False, True]
        assert shard.turn_starts == [[2] if shard.members == [0] else [2, 4]]


def test_turns_that_answer_the_same_observation_have_one_state() -> None:
    first = [Turn(2, 3, 0.0, 0.0, 0.0, "stop", 0), Turn(5, 6, 1.0, 0.0, 0.0, "stop", 0)]
    one = with_sequence(GOOD, first, token_ids=np.array([7, 8, 50, 3, 4, 51], np.int32))
    # The other one begins where the first one's second turn is.
    other = with_sequence(one, token_ids=np.array([3, 4, 60, 9, 9, 61], np.int32))
    samples = [BatchSample(i, 0, 0, 3, outcome_of(trajectory)) for i, trajectory in enumerate((one, other))]
    (shard,) = make_shards(EmitBatch(5, samples, {}), epoch=0, ranks=1)
    (prompt, answer), (again, elsewhere) = (row.turn_states for row in shard.rows)
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
