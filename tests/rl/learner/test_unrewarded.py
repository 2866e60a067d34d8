"""A sample whose reward is not known: the others are credited as if it were not there, and none of it is trained."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from algos.registry import registered
from rl.learner.credit import Minibatch, assign, kept_rows, mask_rows, shaped_rewards
from rl.models.packing import make_packs, split_minibatches
from rl.wire.messages import BatchPart
from rollout.broker.actions import BatchSample, EmitBatch
from rollout.broker.assembly import make_batch_parts, outcome_of
from rollout.broker.statistics import batch_metrics
from rollout.episodes.tokenizer import ChatTokenizer
from tests.rl.learner.test_credit_in_time import SHAPINGS, STEP, Played, algorithm_of, batch_part_of, play, value_of
from tests.rl.learner.test_credit_in_time import chat as chat

FAILED = "my_module:my_reward raised KeyError: 'gold'"


def without_reward(played: list[Played], members: set[int]) -> list[Played]:
    """The same batch, where these samples' rewards have failed, whatever stands in their place."""
    return [
        Played(replace(each.trajectory, unrewarded=FAILED), each.turns) if i in members else each
        for i, each in enumerate(played)
    ]


def minibatches_of(batch_part: BatchPart, advantage: str, *overrides: str) -> list[Minibatch]:
    algorithm = algorithm_of(advantage, *overrides)
    kept = kept_rows(batch_part, algorithm)
    parts = [mask_rows(make_packs(part, 60, STEP), kept) for part in split_minibatches(batch_part, 1)]
    if algorithm.critic is not None:
        parts = [[pack.with_columns(values=value_of(pack.logp_behavior)) for pack in part] for part in parts]
    return assign(batch_part, parts, algorithm)


def trained(minibatches: list[Minibatch]) -> dict[float, tuple[float, float, float]]:
    """Of every trained token: its advantage, its return, and its share of the loss."""
    found = {}
    for minibatch in minibatches:
        for pack in minibatch.packs:
            returns = pack.columns.get("returns", torch.zeros(pack.tokens))
            share = pack.token_weights / max(1, minibatch.loss_tokens)
            for place in pack.mask.nonzero()[:, 0].tolist():
                values = float(pack.advantages[place]), float(returns[place]), float(share[place])
                found[float(pack.logp_behavior[place])] = values
    return found


@pytest.mark.parametrize("members", [{1}, {0, 4}, {0, 1, 2}, {0, 1, 2, 4, 5}])
@pytest.mark.parametrize("advantage", registered("advantage"))
def test_the_others_are_credited_as_if_it_were_not_there(
    chat: ChatTokenizer, advantage: str, members: set[int]
) -> None:
    for seed in range(4):
        played = play(seed, chat)
        found = trained(minibatches_of(batch_part_of(without_reward(played, members)), advantage))
        others = [each for i, each in enumerate(played) if i not in members]
        expected = trained(minibatches_of(batch_part_of(others), advantage))
        assert found.keys() == expected.keys()
        for token, values in expected.items():
            assert found[token] == pytest.approx(values, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("shaping", registered("shaping"))
def test_shapings_see_the_others_alone(chat: ChatTokenizer, shaping: str) -> None:
    played = play(0, chat)
    algorithm = algorithm_of("group", f"algo.shaping=[{{{shaping}: {SHAPINGS.get(shaping, '{}')}}}]")
    found = shaped_rewards(batch_part_of(without_reward(played, {1, 4})), algorithm)
    expected = shaped_rewards(batch_part_of([played[i] for i in (0, 2, 3, 5)]), algorithm)
    assert found[[0, 2, 3, 5]].equal(expected) and not found[[1, 4]].any()


@pytest.mark.parametrize("advantage", registered("advantage"))
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_a_batch_without_any_reward_gives_zeros(chat: ChatTokenizer, advantage: str, aggregation: str) -> None:
    batch_part = batch_part_of(without_reward(play(0, chat), set(range(6))))
    shaping = "algo.shaping=[{affine: {shift: 1.0}}]"
    (minibatch,) = minibatches_of(batch_part, advantage, f"algo.aggregation={aggregation}", shaping)
    assert minibatch.loss_tokens == 0
    for pack in minibatch.packs:
        assert not pack.mask.any() and not pack.advantages.any() and torch.isfinite(pack.token_weights).all()


def test_no_mean_of_rewards_counts_it(chat: ChatTokenizer) -> None:
    played = without_reward(play(0, chat), {0, 1, 2, 4})
    rewards = [played[i].trajectory.reward for i in (3, 5)]
    samples = [
        BatchSample(t.sample_id, t.group_id, 0, STEP, outcome_of(t)) for t in (each.trajectory for each in played)
    ]
    metrics = batch_metrics(STEP, samples)
    assert metrics["rollout/reward"] == pytest.approx(sum(rewards) / 2) and metrics["rollout/accuracy"] == 1.0
    assert (metrics["reward/failed"], metrics["reward/no_opinion"]) == (4, 0)
    (batch_part,) = make_batch_parts(EmitBatch(STEP, samples, metrics), 0, 1)
    assert batch_part.metrics["groups/solved"] == 1.0 and [row.unrewarded for row in batch_part.rows].count(True) == 4
