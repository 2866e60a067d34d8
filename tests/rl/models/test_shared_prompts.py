"""A prompt that several samples answer is computed once, and nothing else changes: numbers, gradients, packs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl.learner.critic import load_critic
from rl.models.packing import Pack, dummy_pack, make_packs
from rl.models.policy import Policy, load_policy
from rl.models.shared_prompts import find_shared
from rl.wire.columns import token_columns
from rl.wire.messages import BatchPart, SampleRow
from tests.rl.learner.tiny_policies import VOCAB, gradients, largest_difference, save_tiny, stock_attention

GROUPS = [(9, [3, 5, 3, 1]), (9, [3, 2]), (6, [4, 4, 4]), (14, [7]), (1, [2, 2])]
"""Tokens of a prompt, and of its answers: equal and different lengths, one alone, a prompt too short to share."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("shared"))


def shard_of(groups: list[tuple[int, list[int]]], seed: int = 0) -> BatchPart:
    """Of random tokens; the samples of the groups in a mixed order."""
    random = np.random.default_rng(seed)
    samples = []
    rows: list[SampleRow] = []
    starts = []
    for group, (prompt, answers) in enumerate(groups):
        asked = random.integers(0, VOCAB, prompt)
        for answer in answers:
            ids = np.concatenate([asked, random.integers(0, VOCAB, answer)])
            mask = np.repeat(np.array([0, 1], np.uint8), [prompt, answer])
            samples.append(token_columns(ids, mask, logp_behavior=-1.0, policy_version=3))
            rows.append(SampleRow(len(rows), group, float(random.normal()), len(ids), answer, 3))
            starts.append([prompt])

    members = random.permutation(len(rows)).tolist()
    return BatchPart(
        step=5,
        rank=0,
        timeline=0,
        rows=rows,
        members=members,
        lengths=[rows[i].tokens for i in members],
        turn_starts=[starts[i] for i in members],
        columns={name: np.concatenate([samples[i][name] for i in members]) for name in samples[0]},
        loss_tokens=sum(row.loss_tokens for row in rows),
    )


def one_pack(groups: list[tuple[int, list[int]]] = GROUPS, seed: int = 0) -> Pack:
    (pack,) = make_packs(shard_of(groups, seed), 10_000, 5, share=True)
    return pack


def shared_of(pack: Pack) -> int | None:
    """Tokens of a forward; None: as many as the pack has."""
    found = find_shared(pack.token_ids, pack.position_ids, pack.mask.nonzero()[:, 0])
    return None if found is None else len(found.tokens)


def one_by_one(policy: Policy, pack: Pack) -> Tensor:
    """(T,) by transformers' own attention, each sample alone."""
    found = torch.zeros(pack.tokens)
    with stock_attention(policy.model):
        for sample in range(len(pack.members)):
            places = (pack.sample == sample).nonzero()[:, 0]
            ids = pack.token_ids[places]
            logp = policy.model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            found = found.index_copy(0, places[1:], logp.gather(-1, ids[1:, None])[:, 0])
    return found * pack.mask


def test_log_probabilities_and_gradients_are_those_of_each_sample_alone(folder: Path) -> None:
    policy = load_policy(folder, logprob_chunk=16)
    pack = one_pack()
    weights = torch.randn(pack.tokens, generator=torch.Generator().manual_seed(0))

    logp = policy(pack.token_ids, pack.position_ids, select=pack.mask).logp
    (logp * weights).sum().backward()
    together = {name: each.clone() for name, each in gradients(policy).items()}
    policy.zero_grad()
    alone = one_by_one(policy, pack)
    (alone * weights).sum().backward()

    # Two groups of four and two with 9, one of three with 6; what is alone or too short stays whole.
    assert shared_of(pack) == (9 + 12) + (9 + 5) + (6 + 12) + 21 + 2 * 3
    torch.testing.assert_close(logp, alone, rtol=0, atol=2e-5)
    separate = gradients(policy)
    assert largest_difference(together, separate) < 2e-6 * max(float(each.abs().max()) for each in separate.values())


def test_activation_checkpointing_gives_the_same_gradients(folder: Path) -> None:
    found = []
    for checkpointing in (False, True):
        policy = load_policy(folder)
        if checkpointing:
            policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        pack = one_pack()
        policy(pack.token_ids, pack.position_ids, select=pack.mask).logp.sum().backward()
        found.append(gradients(policy))
    assert largest_difference(*found) < 1e-6


@given(
    st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 6), min_size=1, max_size=4)), min_size=1, max_size=4)
)
def test_any_groups(folder: Path, groups: list[tuple[int, list[int]]]) -> None:
    policy = load_policy(folder)
    pack = one_pack(groups, seed=1)
    with torch.no_grad():
        logp = policy(pack.token_ids, pack.position_ids, select=pack.mask).logp
        torch.testing.assert_close(logp, one_by_one(policy, pack), rtol=0, atol=2e-5)


def test_values_of_a_critic_are_the_same_too(folder: Path) -> None:
    critic = load_critic(folder)
    torch.nn.init.normal_(critic.head.weight)
    pack = one_pack()
    values = critic(pack.token_ids, pack.position_ids, select=pack.mask)
    critic.shares_prompts = False
    torch.testing.assert_close(values, critic(pack.token_ids, pack.position_ids, select=pack.mask), rtol=0, atol=2e-5)


def test_samples_that_train_nothing_are_left_whole(folder: Path) -> None:
    pack = one_pack([(8, [3, 3, 3])])
    masked = pack.with_columns(loss_mask=pack.mask & (pack.sample != 1))
    policy = load_policy(folder)

    logp = policy(masked.token_ids, masked.position_ids, select=masked.mask).logp

    assert shared_of(masked) == 8 + 3 + 3 + 11
    torch.testing.assert_close(logp, one_by_one(policy, masked), rtol=0, atol=2e-5)
    assert shared_of(dummy_pack()) is None


def test_equal_prompts_of_different_tasks_are_one_and_similar_ones_are_not() -> None:
    ids = torch.tensor([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 4, 8])
    positions = torch.arange(5).repeat(3)
    found = find_shared(ids, positions, torch.tensor([4, 9, 14]))
    assert found is not None
    assert len(found.tokens) == 15 - 4
    assert found.rows[:4].tolist() == found.rows[10:14].tolist()


def test_packs_keep_samples_with_one_prompt_together_and_count_it_once() -> None:
    shard = shard_of([(20, [4] * 6), (20, [4] * 6), (5, [30])])

    plain = make_packs(shard, 48, 5)
    sharing = make_packs(shard, 48, 5, share=True)

    # Of six answers of 4 tokens and their prompt of 20 tokens, 44 in all, a forward of 48 holds one group.
    assert len(sharing) == 3
    assert len(plain) > 5
    assert sorted(row for pack in sharing for row in pack.members) == list(range(13))
    for pack in sharing:
        assert (shared_of(pack) or pack.tokens) <= 48
        assert len({shard.rows[row].group_id for row in pack.members}) == 1


def test_a_group_too_large_for_one_pack_is_cut() -> None:
    shard = shard_of([(20, [4] * 20)])
    sharing = make_packs(shard, 48, 5, share=True)
    assert [len(pack.members) for pack in sharing] == [7, 7, 6]
    assert sorted(row for pack in sharing for row in pack.members) == list(range(20))
