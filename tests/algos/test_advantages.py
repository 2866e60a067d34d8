"""Advantages against numpy and closed forms, signals that are none, and how samples are spread over ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from algos.advantages import Episodes, Estimator, discounted_sums, gae, gae_advantages, make_estimator
from algos.registry import get_advantage, registered

REWARDS = torch.tensor([1.0, 0.0, 3.0, 0.1, 7.0, 0.1, 2.0, 0.1])
GROUP = torch.tensor([70, 5, 70, 9, 5, 9, 70, 9])  # ids are arbitrary, members stand apart
SAMPLE_LEVEL = [name for name in registered("advantage") if get_advantage(name).level == "sample"]


def episodes_of(
    turns: list[list[float]], group: list[int], *, seed: int = 0, states: list[int] | None = None
) -> Episodes:
    """Each turn is one or two observed tokens, then one to three generated ones; rewards by sample and turn."""
    random = np.random.default_rng(seed)
    mask: list[bool] = []
    token_turn: list[int] = []
    token_rewards: list[float] = []
    turn_sample: list[int] = []

    for sample, rewards in enumerate(turns):
        for reward in rewards:
            observed = random.integers(1, 3)
            generated = random.integers(1, 4)
            mask += [False] * observed + [True] * generated
            token_turn += [len(turn_sample)] * (observed + generated)
            token_rewards += [0.0] * (observed + generated - 1) + [reward]
            turn_sample.append(sample)

    return Episodes(
        group=torch.tensor(group),
        turn_rewards=torch.tensor([reward for rewards in turns for reward in rewards], dtype=torch.float64),
        turn_sample=torch.tensor(turn_sample),
        turn_state=torch.tensor(states if states is not None else list(range(len(turn_sample)))),
        token_rewards=torch.tensor(token_rewards, dtype=torch.float64),
        token_turn=torch.tensor(token_turn),
        mask=torch.tensor(mask),
        values=torch.tensor(random.normal(size=len(mask)) * np.array(mask), dtype=torch.float32),
    )


def some_episodes() -> Episodes:
    turns = [[0.0, 1.0], [1.0], [0.5, 0.0, 2.0], [0.0], [0.25, 0.5], [-1.0, 0.0]]
    return episodes_of(turns, [3, 3, 3, 8, 8, 8])


def by_turn(episodes: Episodes, advantages: Tensor) -> list[float]:
    """The one advantage of each turn, which all of its generated tokens must share."""
    found = []
    for turn in range(len(episodes.turn_rewards)):
        values = advantages[(episodes.token_turn == turn) & episodes.mask]
        assert (values == values[0]).all()
        found.append(float(values[0]))
    return found


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize("name", ["group", "group_mean", "leave_one_out"])
def test_sample_level_values(name: str) -> None:
    found = get_advantage(name).function(REWARDS, GROUP)
    for i, group in enumerate(GROUP):
        rewards = REWARDS[group == GROUP].double().numpy()
        others = REWARDS[(group == GROUP) & (torch.arange(8) != i)].double().numpy()
        expected = {
            "group": (REWARDS[i].double() - rewards.mean()) / (rewards.std() + 1e-6),
            "group_mean": REWARDS[i].double() - rewards.mean(),
            "leave_one_out": REWARDS[i].double() - others.mean(),
        }[name]
        assert float(found[i]) == pytest.approx(float(expected), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", SAMPLE_LEVEL)
def test_groups_without_signal_give_exactly_zero(name: str) -> None:
    rewards = torch.tensor([0.1] * 7 + [5.0] + [1e6] * 3)
    found = get_advantage(name).function(rewards, torch.tensor([1] * 7 + [2] + [3] * 3))
    assert found.dtype == torch.float32 and found.shape == (11,)
    assert not found.any()


@pytest.mark.parametrize("name", SAMPLE_LEVEL)
def test_finite_and_the_same_in_any_order(name: str) -> None:
    estimator = get_advantage(name).function
    order = torch.randperm(len(REWARDS), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(estimator(REWARDS[order], GROUP[order]), estimator(REWARDS, GROUP)[order])
    almost = torch.tensor([1.0, 1.0 + 1e-7, 1e30, -1e30])
    assert torch.isfinite(estimator(almost, torch.tensor([0, 0, 1, 1]))).all()
    assert estimator(REWARDS[:0], GROUP[:0]).shape == (0,)


# ---------------------------------------------------------------- turns


def test_turn_returns_against_numpy() -> None:
    episodes = some_episodes()
    found = by_turn(episodes, make_estimator("turn", {"discount": 0.5})(episodes))
    first = np.array([0.5, 1.0, 1.0, 0.5 + 0.5 * 0 + 0.25 * 2, 1.0, 2.0])  # group 3: turns of its three samples
    second = np.array([0.0, 0.25 + 0.25, 0.5, -1.0, 0.0])
    expected = [*(first - first.mean()) / first.std(), *(second - second.mean()) / second.std()]
    assert found == pytest.approx(expected, abs=1e-5)


def test_turn_process_against_numpy() -> None:
    """GRPO with process supervision: normalised rewards of this turn and the later ones."""
    episodes = some_episodes()
    found = by_turn(episodes, make_estimator("turn_process", {})(episodes))
    rewards = np.array([0.0, 1.0, 1.0, 0.5, 0.0, 2.0])
    z = (rewards - rewards.mean()) / rewards.std()
    assert found[:6] == pytest.approx([z[0] + z[1], z[1], z[2], z[3] + z[4] + z[5], z[4] + z[5], z[5]], abs=1e-5)


def test_turn_local_against_numpy() -> None:
    """What the episode is worth on each of its turns, and on each turn what it earned itself."""
    episodes = some_episodes()
    found = by_turn(episodes, make_estimator("turn_local", {"weight": 0.5})(episodes))
    rewards = np.array([0.0, 1.0, 1.0, 0.5, 0.0, 2.0])
    z = (rewards - rewards.mean()) / rewards.std()
    whole = by_turn(episodes, make_estimator("group", {})(episodes))
    assert found[:6] == pytest.approx([w + 0.5 * own for w, own in zip(whole[:6], z, strict=True)], abs=1e-5)


def test_gigpo_against_numpy() -> None:
    """Turns that answered the same observation are compared, whichever episode and turn they stand in."""
    turns = [[0.0, 1.0], [-0.1, 0.0, 0.0], [1.0], [0.0, 1.0]]
    episodes = episodes_of(turns, [3, 3, 3, 8], states=[7, 9, 7, 7, 9, 7, 7, 9])
    returns = np.array([0.5, 1.0, -0.1, 0.0, 0.0, 1.0, 0.5, 1.0])  # discounted by half
    whole = np.array([1.0, -0.1, 1.0])
    whole = (whole - whole.mean()) / whole.std()
    expected = np.array([*whole[[0, 0, 1, 1, 1, 2]], 0.0, 0.0])  # a group of one says nothing
    for same in ([0, 2, 3, 5], [1, 4]):  # group 3, states 7 and 9; group 8 met the same states elsewhere
        expected[same] += 2 * (returns[same] - returns[same].mean()) / returns[same].std()
    found = by_turn(episodes, make_estimator("gigpo", {"weight": 2, "discount": 0.5})(episodes))
    assert found == pytest.approx(expected.tolist(), abs=1e-5)

    centred = by_turn(episodes, make_estimator("gigpo", {"discount": 0.5, "std": False})(episodes))
    assert centred[4] == pytest.approx(-0.1 - np.mean([1.0, -0.1, 1.0]) + 0.0 - 0.5, abs=1e-6)


def test_gigpo_alone_in_a_state_has_the_episode_s_advantage() -> None:
    episodes = some_episodes()
    assert by_turn(episodes, make_estimator("gigpo", {})(episodes)) == by_turn(
        episodes, make_estimator("group", {})(episodes)
    )


@pytest.mark.parametrize("name", ["turn", "turn_process"])
def test_one_turn_per_episode_is_the_group_estimator(name: str) -> None:
    episodes = episodes_of([[1.0], [0.0], [0.5], [2.0], [2.0]], [0, 0, 0, 1, 1])
    assert torch.equal(make_estimator(name, {})(episodes), make_estimator("group", {})(episodes))


def test_a_turn_is_not_praised_for_what_came_before_it() -> None:
    """Both episodes end without reward; one found something in its first turn. The last turns are equally good."""
    episodes = episodes_of([[1.0, 0.0], [0.0, 0.0]], [0, 0])
    found = by_turn(episodes, make_estimator("turn", {})(episodes))
    assert found[0] > 0 and found[1] == found[3] < 0
    whole = by_turn(episodes, make_estimator("group", {})(episodes))
    assert whole[1] > 0  # an estimator of whole episodes praises it


# ---------------------------------------------------------------- tokens


def test_discounted_sums() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    found = discounted_sums(values, torch.tensor([4, 4, 2, 2, 2]), 0.5)
    assert found.tolist() == [2.0, 2.0, 3 + 2 + 1.25, 4 + 2.5, 5.0]
    assert discounted_sums(values[:0], torch.zeros(0, dtype=torch.int64), 0.5).shape == (0,)


def test_batch_normalised_is_rewards_to_go_with_mean_0_and_deviation_1() -> None:
    episodes = some_episodes()
    found = make_estimator("batch", {})(episodes)[episodes.mask].numpy()
    rewards = episodes.token_rewards[episodes.mask].numpy()
    sample = episodes.token_sample[episodes.mask].numpy()
    returns = np.array([rewards[i:][sample[i:] == sample[i]].sum() for i in range(len(rewards))])
    np.testing.assert_allclose(found, (returns - returns.mean()) / (returns.std() + 1e-6), rtol=1e-5, atol=1e-6)
    assert abs(found.mean()) < 1e-6 and found.std() == pytest.approx(1, abs=1e-5)


def test_batch_normalised_after_centring_by_group() -> None:
    episodes = some_episodes()
    found = make_estimator("batch_group", {})(episodes)[episodes.mask].numpy()
    centred = get_advantage("group_mean").function(episodes.rewards, episodes.group)
    expected = centred[episodes.token_sample][episodes.mask].double().numpy()
    expected = (expected - expected.mean()) / (expected.std() + 1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("discount, lam", [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_against_its_recursion(discount: float, lam: float) -> None:
    """A_t = delta_t + gamma lambda A_(t+1) over the generated tokens of each sample, in float64."""
    episodes = some_episodes()
    assert episodes.values is not None
    found = make_estimator("gae", {"discount": discount, "lam": lam, "normalise": False})(episodes)
    for sample in range(len(episodes.group)):
        own = ((episodes.token_sample == sample) & episodes.mask).nonzero()[:, 0].tolist()
        after = 0.0
        next_value = 0.0

        for t in reversed(own):
            value = float(episodes.values[t])
            after = float(episodes.token_rewards[t]) + discount * next_value - value + discount * lam * after
            next_value = value
            assert float(found[t]) == pytest.approx(after, rel=1e-5, abs=1e-6)
    assert not found[~episodes.mask].any()


def test_gae_with_lambda_1_is_return_minus_value_and_with_0_one_step() -> None:
    episodes = some_episodes()
    assert episodes.values is not None
    mask = episodes.mask
    values = episodes.values.double()
    returns = discounted_sums(episodes.token_rewards[mask], episodes.token_sample[mask], 1.0)
    torch.testing.assert_close(gae_advantages(episodes, 1.0, 1.0)[mask], returns - values[mask])
    one_step = gae_advantages(episodes, 1.0, 0.0)[mask]
    same = episodes.token_sample[mask][1:] == episodes.token_sample[mask][:-1]
    following = torch.cat((values[mask][1:] * same, values.new_zeros(1)))
    torch.testing.assert_close(one_step, episodes.token_rewards[mask] + following - values[mask])


def test_a_perfect_critic_leaves_no_advantage() -> None:
    episodes = some_episodes()
    mask = episodes.mask
    values = torch.zeros(len(mask), dtype=torch.float64)
    values[mask] = discounted_sums(episodes.token_rewards[mask], episodes.token_sample[mask], 1.0)
    exact = replace(episodes, values=values)
    assert gae_advantages(exact, 1.0, 0.95).abs().max() < 1e-12


# ---------------------------------------------------------------- all of them


def estimators() -> list[Estimator]:
    return [make_estimator(name, {}) for name in registered("advantage")]


@pytest.mark.parametrize("estimator", estimators(), ids=lambda one: one.spec.name)
def test_no_signal_is_exactly_zero(estimator: Estimator) -> None:
    episodes = episodes_of([[0.1]] * 7 + [[0.1]] * 3, [1] * 7 + [2] * 3)
    found = estimator(replace(episodes, values=torch.zeros(len(episodes.mask))))
    assert found.dtype == torch.float32 and found.shape == episodes.mask.shape
    if estimator.spec.name == "gae":  # alone here it has no baseline; the mean over tokens is not one of samples
        assert make_estimator("gae", {"normalise": False})(episodes).abs().max() > 0
    assert not found.any()


@pytest.mark.parametrize("estimator", estimators(), ids=lambda one: one.spec.name)
def test_masked_tokens_count_nowhere(estimator: Estimator) -> None:
    episodes = some_episodes()
    assert episodes.values is not None
    found = estimator(episodes)
    assert not found[~episodes.mask].any() and torch.isfinite(found).all() and found.any()
    poisoned = torch.where(episodes.mask, episodes.values, torch.nan)
    assert torch.equal(estimator(replace(episodes, values=poisoned)), found)


@pytest.mark.parametrize("estimator", estimators(), ids=lambda one: one.spec.name)
def test_tokens_of_three_ranks_get_what_one_rank_gives_them(estimator: Estimator) -> None:
    """Ranks hold different samples, one of them none; `all_reduce` is played by running all of them in step."""
    episodes = some_episodes()
    expected = estimator(episodes)
    owners = torch.tensor([0, 0, 1, 0, 1, 0])[episodes.token_sample]
    shards = [episodes_part(episodes, owners == rank) for rank in range(3)]
    for rank, found in enumerate(in_step(estimator, shards)):
        torch.testing.assert_close(found, expected[owners == rank], rtol=1e-6, atol=1e-7)


def episodes_part(episodes: Episodes, own: Tensor) -> Episodes:
    assert episodes.values is not None
    return replace(
        episodes,
        token_rewards=episodes.token_rewards[own],
        token_turn=episodes.token_turn[own],
        mask=episodes.mask[own],
        values=episodes.values[own],
    )


def in_step(estimator: Estimator, shards: list[Episodes]) -> list[Tensor]:
    """Each rank repeats its computation until every reduction it asks for is known to all."""
    known: list[Tensor] = []
    while True:
        asked: list[tuple[Tensor, str]] = []
        results = []
        for shard in shards:
            calls = iter(known)

            def reduce(values: Tensor, how: str, calls=calls, asked=asked) -> Tensor:  # type: ignore[no-untyped-def]
                done = next(calls, None)
                if done is None:
                    asked.append((values.clone(), how))
                    raise _Waiting
                copied: Tensor = done.clone()
                return copied

            try:
                results.append(estimator(replace(shard, all_reduce=reduce)))
            except _Waiting:
                continue
        if len(results) == len(shards):
            return results
        assert len(asked) == len(shards) and len({how for _, how in asked}) == 1, "ranks ask for different reductions"
        joined = torch.stack([values for values, _ in asked])
        known.append(joined.sum(0) if asked[0][1] == "sum" else joined.max(0).values)


class _Waiting(Exception):
    pass


# ---------------------------------------------------------------- refusals


def test_unknown_options_and_missing_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"advantage 'gae' has no option 'lamda'; did you mean 'lam'\?"):
        make_estimator("gae", {"lamda": 0.9})
    with pytest.raises(ValueError, match=r"option 'lam' of advantage 'gae' must be `float` <= 1.0, not 1.5"):
        make_estimator("gae", {"lam": 1.5})
    with pytest.raises(ValueError, match="advantage 'group' has no option 'discount'; known: none"):
        make_estimator("group", {"discount": 1.0})
    with pytest.raises(ValueError, match="'gae' needs the values of a critic"):
        make_estimator("gae", {})(replace(some_episodes(), values=None))


def sign_of_reward(rewards: Tensor, group: Tensor) -> Tensor:
    return rewards.sign()


def test_a_function_of_the_users_own() -> None:
    episodes = some_episodes()
    found = make_estimator(sign_of_reward, {})(episodes)
    assert torch.equal(found[episodes.mask], episodes.rewards.sign().float()[episodes.token_sample][episodes.mask])
    assert get_advantage(gae).needs_values


def test_the_guide_lists_every_estimator_at_its_level() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "advantages.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| (sample|turn|token) \|", guide, re.MULTILINE))
    assert listed == {name: get_advantage(name).level for name in registered("advantage")}
