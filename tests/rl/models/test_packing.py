"""Packs hold every sample once, unchanged, within the bound, whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.models.packing import assign, make_packs, pad_packs, split_minibatches
from tests.rl.learner.tiny_policies import make_batch_parts, packs_of


@settings(max_examples=200)
@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 100))
def test_assignment(lengths: list[int], max_tokens: int) -> None:
    packs = assign(lengths, max_tokens)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    for pack in packs:
        assert len(pack) == 1 or sum(lengths[i] for i in pack) <= max_tokens
    within = [sum(lengths[i] for i in pack) for pack in packs if sum(lengths[i] for i in pack) <= max_tokens]
    # First-fit-decreasing leaves at most one pack half empty.
    assert len(within) <= 2 * sum(within) / max_tokens + 1


def test_assignment_is_balanced() -> None:
    loads = [sum(pack) for pack in ([[9, 8, 7, 3, 2, 1][i] for i in pack] for pack in assign([9, 8, 7, 3, 2, 1], 16))]
    assert sorted(loads) == [15, 15]


def test_packs_hold_what_the_batch_part_holds() -> None:
    (batch_part,) = make_batch_parts(1)
    offsets = np.concatenate(([0], np.cumsum(batch_part.lengths)))
    packs = make_packs(batch_part, 64, version=5)
    assert len(packs) > 1

    seen = []
    for pack in packs:
        for i, member in enumerate(pack.members):
            seen.append(member)
            where = pack.sample == i
            span = slice(offsets[batch_part.members.index(member)], offsets[batch_part.members.index(member) + 1])
            mask = batch_part.loss_mask[span].astype(bool)

            np.testing.assert_array_equal(pack.token_ids[where], batch_part.token_ids[span])
            np.testing.assert_array_equal(pack.mask[where], mask)
            np.testing.assert_array_equal(pack.logp_behavior[where], batch_part.logp_behavior[span])
            np.testing.assert_array_equal(pack.staleness[where], np.where(mask, 5 - batch_part.policy_version[span], 0))
            np.testing.assert_array_equal(pack.position_ids[where], np.arange(batch_part.rows[member].tokens))
            assert not pack.advantages[where].any() and (pack.token_weights[where] == 1).all()
            assert pack.rewards[i] == pytest.approx(batch_part.rows[member].reward)

    assert sorted(seen) == sorted(batch_part.members)


def test_a_long_sample_gets_a_pack_of_its_own() -> None:
    (batch_part,) = make_batch_parts(1)
    longest = max(batch_part.lengths)
    packs = packs_of(batch_part, longest - 1)
    assert [pack.tokens for pack in packs if pack.tokens > longest - 1] == [longest]
    assert len(packs[0].members) == 1


def test_padding() -> None:
    (batch_part,) = make_batch_parts(1)
    packs = packs_of(batch_part)
    padded = pad_packs(packs, len(packs) + 2)
    assert padded[: len(packs)] == packs and [pack.loss_tokens for pack in padded[len(packs) :]] == [0, 0]
    with pytest.raises(ValueError, match="cannot be padded"):
        pad_packs(packs, len(packs) - 1)


def test_minibatches_are_whole_groups_and_the_same_on_every_rank() -> None:
    batch_parts = make_batch_parts(2, groups=4)
    rows = batch_parts[0].rows
    parts = [split_minibatches(batch_part, 2) for batch_part in batch_parts]

    for part, groups in ((0, {0, 1}), (1, {2, 3})):
        members = [member for rank in parts for member in rank[part].members]
        assert sorted(members) == [i for i, row in enumerate(rows) if row.group_id in groups]
        expected = sum(row.loss_tokens for row in rows if row.group_id in groups)
        assert [rank[part].loss_tokens for rank in parts] == [expected, expected]
        assert sum(int(rank[part].loss_mask.sum()) for rank in parts) == expected

    assert sum(len(part.token_ids) for part in parts[0]) == len(batch_parts[0].token_ids)
    (whole,) = split_minibatches(batch_parts[0], 1)
    np.testing.assert_array_equal(whole.token_ids, batch_parts[0].token_ids)
    with pytest.raises(ValueError, match="cannot be split"):
        split_minibatches(batch_parts[0], 3)


def test_a_rank_without_samples_has_no_packs() -> None:
    empty = split_minibatches(make_batch_parts(6, groups=2, group_size=3)[5], 2)[
        0
    ]  # its only sample is in the other half
    assert empty.members == [] and empty.loss_tokens > 0
    assert make_packs(empty, 64, version=5) == []
    assert [pack.loss_tokens for pack in packs_of(empty)] == [0]  # a dummy
