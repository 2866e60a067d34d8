"""What sequences have in common is computed once, and nothing else changes: numbers, gradients, packs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rl.models.layout import COPIED_ROWS, SEGMENT_TOKENS, Layout, lay_out
from rl.models.packing import Pack, dummy_pack, make_packs, sequence_pack
from rl.models.policy import Critic, Policy
from rl.models.protocol import ModelOptions
from rl.wire.columns import COLUMNS, Column
from tests.rl.learner.tiny_policies import (
    VOCAB,
    gradients,
    group_batch_part,
    largest_difference,
    save_tiny,
    stock_attention,
)

GROUPS = [(9, [3, 5, 3, 1]), (9, [3, 2]), (6, [4, 4, 4]), (14, [7]), (1, [2, 2])]
"""Tokens of a prompt, and of its answers: equal and different lengths, one alone, a prompt too short to share."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("shared"))


def one_pack(groups: list[tuple[int, list[int]]] = GROUPS, seed: int = 0) -> Pack:
    (pack,) = make_packs(group_batch_part(groups, seed), 10_000, 5)
    return pack


def layout_of(pack: Pack) -> Layout:
    layout = pack.laid_out().layout
    assert layout is not None
    return layout


def one_by_one(policy: Policy, pack: Pack) -> Tensor:
    """(T,) by transformers' own attention, each sequence alone."""
    found = torch.zeros(pack.tokens)
    starts = (pack.position_ids == 0).nonzero()[:, 0].tolist()
    with stock_attention(policy.model):
        for start, end in zip(starts, [*starts[1:], pack.tokens], strict=True):
            ids = pack.token_ids[start:end]
            logp = policy.model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            found = found.index_copy(0, torch.arange(start + 1, end), logp.gather(-1, ids[1:, None])[:, 0])
    return found * pack.mask


def equal_one_by_one(policy: Policy, pack: Pack) -> None:
    """Log-probabilities, and gradients with a weight for each token."""
    weights = torch.randn(pack.tokens, generator=torch.Generator().manual_seed(0))
    logp = policy(pack).logp
    (logp * weights).sum().backward()
    together = {name: each.clone() for name, each in gradients(policy).items()}
    policy.zero_grad()
    alone = one_by_one(policy, pack)
    (alone * weights).sum().backward()

    torch.testing.assert_close(logp, alone, rtol=0, atol=2e-5)
    separate = gradients(policy)
    assert largest_difference(together, separate) < 2e-6 * max(float(each.abs().max()) for each in separate.values())
    policy.zero_grad()


def test_log_probabilities_and_gradients_are_those_of_each_sample_alone(folder: Path) -> None:
    pack = one_pack()
    equal_one_by_one(Policy.load(folder, options=ModelOptions(logprob_chunk=16)), pack)

    # Each prompt once but the one that is too short; no token that stands last in its sample.
    answers = (2 + 4 + 2 + 0) + (2 + 1) + (3 + 3 + 3) + 6
    assert len(layout_of(pack).tokens) == 9 + 9 + 6 + 14 + answers + 2 * 2


def test_activation_checkpointing_gives_the_same_gradients(folder: Path) -> None:
    found = []
    for checkpointing in (False, True):
        policy = Policy.load(folder, options=ModelOptions(activation_checkpointing=checkpointing))
        policy(one_pack()).logp.sum().backward()
        found.append(gradients(policy))
    assert largest_difference(*found) < 1e-6


@given(
    st.lists(st.tuples(st.integers(1, 12), st.lists(st.integers(1, 6), min_size=1, max_size=4)), min_size=1, max_size=4)
)
def test_any_groups(folder: Path, groups: list[tuple[int, list[int]]]) -> None:
    policy = Policy.load(folder)
    pack = one_pack(groups, seed=1)
    with torch.no_grad():
        torch.testing.assert_close(policy(pack).logp, one_by_one(policy, pack), rtol=0, atol=2e-5)


# ---------------------------------------------------------------- forests


def forest(seed: int, sequences: int = 14, turns: int = 4) -> Pack:
    """Samples of several turns that leave each other's history at any depth; some are equal, some train nothing."""
    random = np.random.default_rng(seed)
    made = [random.integers(0, VOCAB, random.integers(1, 12))]
    for _ in range(sequences - 1):
        before = made[random.integers(len(made))] if random.random() < 0.8 else made[0][:0]
        kept = before[: random.integers(0, len(before) + 1)]
        grown = [random.integers(0, VOCAB, random.integers(0, 9)) for _ in range(random.integers(1, turns))]
        ids = np.concatenate([kept, *grown])
        made.append(ids if len(ids) else made[0])

    columns = dummy_pack().columns
    lengths = torch.tensor([len(ids) for ids in made])
    ids = torch.from_numpy(np.concatenate(made))
    number = torch.arange(len(made)).repeat_interleave(lengths)
    columns = {name: values.expand(len(ids), *values.shape[1:]) for name, values in columns.items()}
    mask = torch.from_numpy(random.random(len(ids)) < 0.6) & (number % 5 != 3)
    return Pack(
        columns=columns | {"token_ids": ids, "loss_mask": mask},
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        sample=number,
        turn=torch.zeros_like(number),
        rewards=torch.zeros(len(made)),
        members=tuple(range(len(made))),
    )


SHAPES = {
    "one head for all": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "grouped heads": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "every head its own": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "window": {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5},
}


@pytest.fixture(scope="module", params=SHAPES)
def shaped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """Models with queries, keys and values of different numbers; of the last one a layer sees five tokens."""
    shape: dict[str, Any] = SHAPES[request.param]
    torch.manual_seed(1)
    kinds = ["full_attention", "sliding_attention"] if "sliding_window" in shape else ["full_attention"] * 2
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        initializer_range=0.15,
        layer_types=kinds,
        use_sliding_window="sliding_window" in shape,
        **shape,
    )
    folder = tmp_path_factory.mktemp("shaped")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return Policy.load(folder)


@pytest.mark.parametrize("seed", range(4))
def test_forests_equal_their_sequences_one_by_one(shaped: Policy, seed: int) -> None:
    pack = forest(seed)
    layout = layout_of(pack)
    assert layout.segments.keys is not None, "the seed of the test shares nothing"
    equal_one_by_one(shaped, pack)


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_any_forest(folder: Path, seed: int) -> None:
    policy = Policy.load(folder)
    pack = forest(seed, sequences=8)
    with torch.no_grad():
        torch.testing.assert_close(policy(pack).logp, one_by_one(policy, pack), rtol=0, atol=2e-5)


def test_turns_of_one_history_are_computed_once(folder: Path) -> None:
    """Three sequences of a sample: the history, the same with a second turn, and a fork after the first."""
    history = list(range(10, 30))
    second = [*history, *range(40, 52)]
    fork = [*history, *range(52, 60)]
    pack = of_sequences([history, second, fork])
    assert len(layout_of(pack).tokens) == 20 + 11 + 7
    equal_one_by_one(Policy.load(folder), pack)


def of_sequences(sequences: list[list[int]]) -> Pack:
    packs = [sequence_pack(ids) for ids in sequences]
    columns = {name: torch.cat([pack.columns[name] for pack in packs]) for name in packs[0].columns}
    positions = torch.cat([pack.position_ids for pack in packs])
    number = torch.arange(len(packs)).repeat_interleave(torch.tensor([pack.tokens for pack in packs]))
    zeros = torch.zeros_like(number)
    return Pack(columns, positions, number, zeros, torch.zeros(len(packs)), tuple(range(len(packs))))


def test_values_of_a_critic_are_the_same_too(folder: Path) -> None:
    critic = Critic.load(folder)
    torch.nn.init.normal_(critic.head.weight)
    pack = one_pack()
    alone = lay_out([pack.token_ids.numpy(), pack.sample.numpy()], pack.position_ids.numpy(), pack.mask.numpy())
    assert alone.segments.keys is None
    torch.testing.assert_close(critic(pack), critic(replace(pack, layout=alone)), rtol=0, atol=2e-5)


# ---------------------------------------------------------------- what is computed


def test_of_samples_that_train_nothing_nothing_is_computed(folder: Path) -> None:
    pack = one_pack([(8, [3, 3, 3])])
    masked = pack.with_columns(loss_mask=pack.mask & (pack.sample != 1))
    policy = Policy.load(folder)

    assert len(layout_of(masked).tokens) == 8 + 2 + 2
    torch.testing.assert_close(policy(masked).logp, one_by_one(policy, masked), rtol=0, atol=2e-5)
    assert len(layout_of(dummy_pack()).tokens) == 1  # a forward of a sharded model has to run


def test_equal_beginnings_of_different_tasks_are_one_and_similar_ones_as_far_as_they_are_equal() -> None:
    sequences = [[1, 2, 3, 4, 5, 6, 9], [1, 2, 3, 4, 5, 7, 9], [1, 2, 3, 4, 5, 6, 8]]
    layout = layout_of(of_sequences(sequences))
    assert len(layout.tokens) == 6 + 1
    states = layout.rows.view(3, 6)
    assert states[0].tolist() == states[2].tolist()
    assert states[1, :5].tolist() == states[0, :5].tolist() and states[1, 5] != states[0, 5]


def test_a_beginning_is_shared_only_where_all_that_a_forward_reads_is_equal() -> None:
    ids = np.tile(np.arange(12), 2)
    positions = np.tile(np.arange(12), 2)
    mask = np.ones(24, np.bool_)
    experts = np.zeros((24, 2, 3), np.uint8)
    assert len(lay_out([ids, experts], positions, mask).tokens) == 11

    experts[12 + 7, 1, 2] = 1  # of the second sequence's eighth token, which stands after a beginning of seven
    found = lay_out([ids, experts], positions, mask)
    assert len(found.tokens) == 11 + 4
    assert found.rows[:7].tolist() == found.rows[11:18].tolist() and found.rows[7] != found.rows[18]


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_sharing_never_costs_more_than_it_saves(seed: int) -> None:
    """By tokens computed, products of queries and keys, calls and copied rows, against the same sequences alone."""
    pack = forest(seed).laid_out()
    alone = lay_out([pack.token_ids.numpy(), pack.sample.numpy()], pack.position_ids.numpy(), pack.mask.numpy())
    shared = layout_of(pack)

    def products(layout: Layout) -> float:
        """As a CPU computes them: half of a causal square, or a masked rectangle."""
        runs = layout.segments.runs
        return sum(n * (c + length) * min(length, (c + length) / 2) for c, length, n in map(shape, runs))

    runs = [run for run in shared.segments.runs if run.context]
    copied = sum(count * (context + length) for context, length, count in map(shape, runs))
    calls = sum(run.count for run in runs)
    fewer = len(alone.tokens) - len(shared.tokens)
    assert fewer >= SEGMENT_TOKENS * calls + copied / COPIED_ROWS
    assert products(shared) <= products(alone)
    assert shared.targets.tolist() == alone.targets.tolist()


def shape(run: Any) -> tuple[int, int, int]:
    return run.context, run.length, run.count


def test_what_is_short_beside_the_rest_is_not_shared() -> None:
    """The keys of a long answer are not copied for a few tokens of a prompt."""
    random = np.random.default_rng(0)
    rest = [random.integers(0, VOCAB, 2000).tolist() for _ in range(2)]
    pack = of_sequences([[1, 2, 3, 4, 5, 6, 7, 8, number, *ids] for number, ids in enumerate(rest)])
    assert layout_of(pack).segments.keys is None


def test_a_pack_is_laid_out_on_the_host(folder: Path) -> None:
    pack = one_pack()
    away = replace(pack, columns={name: values.to("meta") for name, values in pack.columns.items()})
    with pytest.raises(ValueError, match="laid out on the host"):
        Policy.load(folder)(away)
    with pytest.raises(ValueError, match="begins with the first token of a sequence"):
        replace(pack, position_ids=pack.position_ids + 1).laid_out()


def test_the_layout_is_of_the_tokens_that_count_now() -> None:
    pack = one_pack().laid_out()
    assert pack.with_columns(advantages=torch.zeros(pack.tokens)).layout is pack.layout
    for changed in ({"loss_mask": ~pack.mask}, {"token_ids": pack.token_ids + 1}):
        assert pack.with_columns(**changed).layout is None


# ---------------------------------------------------------------- packs


def test_packs_keep_samples_with_one_prompt_together_and_count_it_once() -> None:
    batch_part = group_batch_part([(20, [4] * 6), (20, [4] * 6), (5, [30])])
    packs = make_packs(batch_part, 48, 5)

    # Of six answers of 4 tokens and their prompt of 20 tokens, 44 in all, a forward of 48 holds one group.
    assert len(packs) == 3
    assert sorted(row for pack in packs for row in pack.members) == list(range(13))
    for pack in packs:
        assert len(layout_of(pack).tokens) <= 48
        assert len({batch_part.rows[row].group_id for row in pack.members}) == 1


def test_a_group_too_large_for_one_pack_is_cut() -> None:
    batch_part = group_batch_part([(20, [4] * 20)])
    packs = make_packs(batch_part, 48, 5)
    assert [len(pack.members) for pack in packs] == [7, 7, 6]
    assert sorted(row for pack in packs for row in pack.members) == list(range(20))


def test_packs_share_a_prompt_only_where_its_forward_columns_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as routed experts: the state of the same prompt is another one where it went through others."""
    monkeypatch.setitem(COLUMNS, "routed", Column("routed", "uint16", covers="context", reads="forward"))
    part = group_batch_part([(20, [6, 6, 6])])
    size = len(part.columns["token_ids"])
    computed = []

    for values in (np.zeros(size, np.uint16), np.arange(size, dtype=np.uint16)):
        (pack,) = make_packs(replace_struct(part, columns={**part.columns, "routed": values}), 1000, 5)
        layout = pack.laid_out().layout
        assert layout is not None
        computed.append(len(layout.tokens))

    assert computed == [20 + 3 * 5, 3 * (20 + 5)]
