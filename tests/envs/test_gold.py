"""Demonstrations by environments that know their solutions, and what their player does wrong on purpose."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from envs.gold import demonstrate
from envs.registry import make_family
from launch.warm_start.imitation import demonstrations
from rl.config.schema import ConfigError, load_config
from rollout.episodes.environment import ChatMessage, Demonstration, Step

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


class Narrow:
    """Room for one episode. Even tasks take two turns, which know nothing after a slip; odd ones nobody can solve."""

    free: asyncio.Semaphore
    right = 0

    def make(self) -> Narrow:
        made = Narrow()
        made.free = self.free
        return made

    def task_count(self, split: str) -> int:
        return 2

    def task(self, split: str, index: int) -> int:
        return index

    async def reset(self, task: int) -> list[ChatMessage]:
        await self.free.acquire()
        self.task_index = task
        return []

    async def gold(self) -> str | None:
        return f"turn {self.right}" if self.task_index == 0 else None

    async def step(self, action: str, truncated: bool = False) -> Step:
        self.right = self.right + 1 if action == f"turn {self.right}" else -1
        self.task_index += self.right < 0
        return Step([], 0.0, self.right == 2, self.right == 2)

    async def close(self) -> None:
        self.free.release()


def test_a_slip_needs_no_second_place_and_is_always_a_turn_that_somebody_knows() -> None:
    async def play() -> list[Demonstration]:
        family: Any = Narrow()
        family.free = asyncio.Semaphore(1)
        async with asyncio.timeout(20):
            return await demonstrate(family, 40, seed=0, mistakes=0.0, max_turns=3, slips=0.5)

    actions = [[turn.action for turn in each.turns] for each in asyncio.run(play())]
    assert {action for each in actions for action in each} == {"turn 0", "turn 1"}
    assert ["turn 0", "turn 0"] in actions, "nobody knows how to go on after the slip, which stays"


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
