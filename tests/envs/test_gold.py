"""Demonstrations by environments that know their solutions, and what their player does wrong on purpose."""

from __future__ import annotations

import asyncio

import pytest

from envs.gold import demonstrate
from envs.registry import make_family
from launch.warm_start.imitation import demonstrations
from rl.core.config import ConfigError, load_config
from rollout.episodes.environment import Demonstration

LAKE = ["env.name=gymnasium", "env.options.id=FrozenLake-v1", "env.options.kwargs={is_slippery: false}"]
MIXED = [
    "env.name=mixture",
    "env.options.members={sums: {env: math}, twice: {env: reasoning_gym, options: {dataset: chain_sum}}}",
]


def played(overrides: list[str], count: int, **habits: float) -> list[Demonstration]:
    family = make_family(load_config(None, overrides))

    async def play() -> list[Demonstration]:
        await family.start()
        try:
            return await demonstrate(family, count, seed=3, max_turns=12, **{"mistakes": 0.0, **habits})
        finally:
            await family.stop()

    return asyncio.run(play())


def test_slips_are_imitated_as_often_as_asked_and_the_rest_is_right() -> None:
    right = played(["env.name=math"], 300)
    slipping = played(["env.name=math"], 300, slips=0.4)
    assert len(right) == len(slipping) == 300, "an episode with a slip is kept"
    assert [each.opening for each in right] == [each.opening for each in slipping], "in the same tasks"
    assert all(turn.imitate for each in slipping for turn in each.turns)

    wrong = [a.turns[0].action != b.turns[0].action for a, b in zip(right, slipping, strict=True)]
    assert 0.3 < sum(wrong) / 300 < 0.5
    assert all("boxed" in each.turns[0].action for each in slipping), "a slip is what is right somewhere"
    assert played(["env.name=math"], 300, slips=0.4) == slipping


def test_a_slip_in_a_mixture_is_what_is_right_in_the_same_member() -> None:
    right = played(MIXED, 200)
    members = {each.opening[-1].content: "boxed" in each.turns[0].action for each in right}
    assert set(members.values()) == {True, False}
    for each in played(MIXED, 200, slips=0.5):
        assert ("boxed" in each.turns[0].action) == members[each.opening[-1].content]


def test_walks_go_on_after_a_slip() -> None:
    walks = played(LAKE, 60, slips=0.3)
    assert all(turn.imitate for walk in walks for turn in walk.turns)
    longest = max(len(walk.turns) for walk in played(LAKE, 60))
    assert len(walks) == 60 and max(len(walk.turns) for walk in walks) > longest


def test_mistakes_are_shown_and_not_imitated() -> None:
    walks = played(LAKE, 60, mistakes=0.3)
    assert any(not turn.imitate for walk in walks[1::2] for turn in walk.turns)


def test_a_demonstrator_that_makes_no_slips_is_refused() -> None:
    config = load_config(
        None, ["env.name=tool_loop", "model.warm_start.demonstrations=4", "model.warm_start.slips=0.2"]
    )
    with pytest.raises(
        ConfigError, match=r"model\.warm_start\.slips=0\.2: the demonstrator of env 'tool_loop' makes none"
    ):
        demonstrations(config)
