"""From a batch part to the advantage, weight and return of every token."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from algos.registry import get_advantage
from algos.rewards import RewardInputs
from rl.config.schema import load_config
from rl.learner.algorithm import Algorithm, make_algorithm
from rl.learner.credit import assign, gather_episodes, kept_rows, mask_rows, shaped_rewards
from rl.models.packing import Pack, dummy_pack, make_packs, split_minibatches
from rl.wire.messages import BatchPart
from tests.rl.learner.learner_harness import make_batch

TURNS = [[0.0, 1.0], [0.5, 0.25], [1.0, 0.0], [0.0, 0.0], [0.0, 2.0], [1.0, 1.0], [0.25, 0.0], [0.0, 0.5]]
TRUNCATED = (1, 6)


def algorithm(*overrides: str) -> Algorithm:
    settings = ("sampling.max_tokens=20", "env.max_turns=2", "rollout.groups_per_batch=4", "rollout.group_size=2")
    return make_algorithm(load_config(None, [*settings, *overrides]))


def one_batch_part() -> BatchPart:
    """Four groups of two two-turn samples, rewarded by turn."""
    (batch_part,) = make_batch(0)
    rows = [
        msgspec.structs.replace(row, reward=sum(earned), turn_rewards=earned, truncated=i in TRUNCATED)
        for i, (row, earned) in enumerate(zip(batch_part.rows, TURNS, strict=True))
    ]
    return msgspec.structs.replace(batch_part, rows=rows)


def credited(
    algo: Algorithm, batch_part: BatchPart, minibatches: int = 1, max_tokens: int = 40, **fields: Any
) -> list[Pack]:
    kept = kept_rows(batch_part, algo)
    parts = [
        [_with(pack, **fields) for pack in mask_rows(make_packs(part, max_tokens, 0), kept)]
        + [_with(dummy_pack(), **fields)]
        for part in split_minibatches(batch_part, minibatches)
    ]
    return [pack for minibatch in assign(batch_part, parts, algo) for pack in minibatch.packs]


def _with(pack: Pack, **functions: Any) -> Pack:
    return pack.with_columns(**{name: function(pack) for name, function in functions.items()})


def tokens_of(packs: list[Pack], member: int, field: str, *, turn: int | None = None) -> torch.Tensor:
    """A field on the loss tokens of one sample (of one turn)."""
    for pack in packs:
        if member in pack.members:
            chosen = pack.mask & (pack.sample == pack.members.index(member))
            if turn is not None:
                chosen &= pack.turn == turn
            return pack.columns[field][chosen]
    raise AssertionError(f"sample {member} is in no pack")


def test_turns_and_their_rewards_stand_where_they_were_earned() -> None:
    batch_part = one_batch_part()
    packs = make_packs(batch_part, 40, 0)
    algo = algorithm()
    episodes, _ = gather_episodes(batch_part, packs, shaped_rewards(batch_part, algo), algo)
    assert episodes.rewards.tolist() == [sum(earned) for earned in TURNS]
    flat = [reward for earned in TURNS for reward in earned]
    for turn, (sample, reward) in enumerate(zip(episodes.turn_sample.tolist(), flat, strict=True)):
        own = ((episodes.token_turn == turn) & episodes.mask).nonzero()[:, 0]
        assert episodes.token_rewards[own].tolist() == [0.0] * (len(own) - 1) + [reward]
        assert (episodes.token_sample[own] == sample).all() and len(own) >= 2
    assert not episodes.token_rewards[~episodes.mask].any()


def test_rows_without_turn_rewards_are_one_turn() -> None:
    (batch_part,) = make_batch(0)
    algo = algorithm()
    episodes, _ = gather_episodes(batch_part, make_packs(batch_part, 40, 0), shaped_rewards(batch_part, algo), algo)
    assert episodes.turn_sample.tolist() == list(range(8))
    np.testing.assert_array_equal(episodes.turn_rewards, [row.reward for row in batch_part.rows])


def test_shaping_changes_advantages_turns_and_what_the_loss_sees() -> None:
    batch_part = one_batch_part()
    lengths = torch.tensor([row.loss_tokens for row in batch_part.rows])
    algo = algorithm("algo.shaping=[{overlong: {max_tokens: 8, buffer: 4}}]", "algo.advantage=turn")
    expected = torch.tensor([sum(earned) for earned in TURNS]) - ((lengths - 4) / 4).clamp(0, 1)
    rewards = shaped_rewards(batch_part, algo)
    torch.testing.assert_close(rewards.float(), expected)

    episodes, _ = gather_episodes(batch_part, make_packs(batch_part, 40, 0), rewards, algo)
    torch.testing.assert_close(episodes.rewards, rewards)
    first = episodes.turn_rewards[::2].tolist()
    assert first == [earned[0] for earned in TURNS]  # only the last turn pays

    packs = credited(algo, batch_part)
    for pack in packs:
        if pack.members:
            torch.testing.assert_close(pack.rewards, expected[list(pack.members)])


@pytest.mark.parametrize("advantage", ["group", "turn", "batch"])
def test_kl_in_the_reward(advantage: str) -> None:
    """Each generated token costs beta (log pi_behavior - log pi_reference); a sample, a turn, the rest their sums."""
    batch_part = one_batch_part()
    beta = 0.1
    algo = algorithm("algo.kl={coef: 0.1, place: reward, estimator: k1}", f"algo.advantage={advantage}")
    assert algo.regularisation.kl_coef == 0

    def reference(pack: Pack) -> torch.Tensor:
        return (pack.logp_behavior + pack.token_ids / 100).masked_fill(~pack.mask, torch.nan)

    found = credited(algo, batch_part, logp_reference=reference)
    plain = make_packs(batch_part, 40, 0)
    cost = {
        (i, t): -beta * float(tokens_of(plain, i, "token_ids", turn=t).sum()) / 100 for i in range(8) for t in (0, 1)
    }
    turns = torch.tensor([[TURNS[i][t] - cost[i, t] for t in (0, 1)] for i in range(8)], dtype=torch.float64)
    group = torch.arange(4).repeat_interleave(2)

    if advantage == "group":
        expected = get_advantage("group").function(turns.sum(1), group)
        for i in range(8):
            torch.testing.assert_close(tokens_of(found, i, "advantages")[0], expected[i])

    elif advantage == "turn":
        returns = torch.stack((turns.sum(1), turns[:, 1]), 1).flatten()
        expected = get_advantage("group").function(returns, group.repeat_interleave(2)).reshape(8, 2)
        for i in range(8):
            for t in (0, 1):
                torch.testing.assert_close(tokens_of(found, i, "advantages", turn=t)[0], expected[i, t])

    else:  # rewards to go of each token, normalised over all of them
        to_go = []
        for i in range(8):
            rewards = torch.cat([beta * tokens_of(plain, i, "token_ids", turn=t).double() / 100 for t in (0, 1)])
            rewards[len(tokens_of(plain, i, "token_ids", turn=0)) - 1] += TURNS[i][0]
            rewards[-1] += TURNS[i][1]
            to_go.append(rewards.flip(0).cumsum(0).flip(0))
        every = torch.cat(to_go)
        for i in range(8):
            expected = ((to_go[i] - every.mean()) / every.std(correction=0)).float()
            torch.testing.assert_close(tokens_of(found, i, "advantages"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("masked", [False, True])
def test_aggregation_by_minibatch(aggregation: str, masked: bool) -> None:
    """Weights / loss tokens are the coefficients of the formula, in each of the two minibatches."""
    batch_part = one_batch_part()
    algo = algorithm(f"algo.aggregation={aggregation}", f"algo.mask_truncated={str(masked).lower()}")
    parts = [
        mask_rows(make_packs(part, 30, 0), kept_rows(batch_part, algo)) for part in split_minibatches(batch_part, 2)
    ]
    minibatches = assign(batch_part, parts, algo)

    for number, minibatch in enumerate(minibatches):
        members = [i for i in range(4 * number, 4 * number + 4) if not (masked and i in TRUNCATED)]
        lengths = {i: batch_part.rows[i].loss_tokens for i in members}
        assert minibatch.loss_tokens == sum(lengths.values()) == sum(pack.loss_tokens for pack in minibatch.packs)

        for i in members:
            coefficient = {
                "token": 1 / sum(lengths.values()),
                "sequence": 1 / (len(members) * lengths[i]),
                "constant": 1 / (len(members) * 20 * 2),  # max_tokens, max_turns
            }[aggregation]
            found = tokens_of(minibatch.packs, i, "token_weights") / minibatch.loss_tokens
            assert found.tolist() == pytest.approx([coefficient] * lengths[i], rel=1e-6)


def test_truncated_samples_count_in_their_group_but_not_in_the_loss() -> None:
    batch_part = one_batch_part()
    whole = credited(algorithm(), batch_part)
    masked = credited(algorithm("algo.mask_truncated=true"), batch_part)
    for i in range(8):
        assert len(tokens_of(masked, i, "advantages")) == (0 if i in TRUNCATED else batch_part.rows[i].loss_tokens)
        if i not in TRUNCATED:
            assert torch.equal(tokens_of(masked, i, "advantages"), tokens_of(whole, i, "advantages"))


def test_returns_are_what_values_should_have_been() -> None:
    batch_part = one_batch_part()
    algo = algorithm("algo.advantage=gae", "algo.critic.lam=1")

    def values(pack: Pack) -> torch.Tensor:
        return torch.where(pack.mask, torch.sin(pack.token_ids.float()), 0)

    packs = credited(algo, batch_part, values=values)
    for i in range(8):
        first, last = (tokens_of(packs, i, "returns", turn=t) for t in (0, 1))
        assert first.tolist() == pytest.approx([sum(TURNS[i])] * len(first), abs=1e-6)
        assert last.tolist() == pytest.approx([TURNS[i][1]] * len(last), abs=1e-6)
    assert all(pack.returns is not None for pack in packs)  # dummies too: every pack of a batch is alike


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["algo.advantage=gae"], "'gae' needs the values of a critic: set algo.critic={}"),
        (["algo.critic={}"], "algo.advantage='group' uses no values: set algo.advantage=gae"),
        (["rollout.group_size=1"], "algo.advantage='group' .* is 0 for rollout.group_size=1"),
        (["algo.kl.reference=/nowhere"], "algo.kl.reference='/nowhere': no config.json in this folder"),
        (
            ["algo.advantage=gae", "algo.critic.path=/nowhere"],
            "algo.critic.path='/nowhere': no config.json in this folder",
        ),
        (["algo.advantage={group: {lam: 1}}"], "advantage 'group' has no option 'lam'"),
        (["algo.shaping=[{overlong: {buffer: 99}}]"], "'overlong' fails .* buffer=99 is more than"),
        (["algo.shaping=['tests.rl.learner.test_credit:raising']"], "raising' fails on two samples: not today"),
        (["algo.shaping=['tests.rl.no:thing']"], "cannot be imported"),
        (
            ["algo.advantage=gae", "algo.critic={pretrain_steps: 100}"],
            "algo.critic.pretrain_steps=100 leaves none of steps=100 to the policy",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        algorithm(*overrides)
    assert "\n" not in str(raised.value)


def raising(inputs: RewardInputs, options: object) -> torch.Tensor:
    raise RuntimeError("not today")
