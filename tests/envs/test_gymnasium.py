"""Gymnasium games as text: what is shown, which actions are understood, workers that die."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces as gym_spaces

from envs.gymnasium import spaces
from envs.gymnasium.environment import GymnasiumFamily
from envs.gymnasium.screen import plain
from envs.registry import make_family
from rl.config.schema import ConfigError, load_config
from tests.envs.playing import episode, gold_steps, with_family

NAME = "env.name=gymnasium"
LAKE = (NAME, "env.options.id=FrozenLake-v1", "env.options.kwargs={is_slippery: false}")


def test_colours_become_marks_and_codes_go() -> None:
    assert plain("\n  (Right)\nS\x1b[41mF\x1b[0mFF\nFHFH\n\n") == "  (Right)\nS[F]FF\nFHFH"
    assert plain("|\x1b[34;1mR\x1b[0m: |\x1b[35mY\x1b[0m|  \n") == "|(blue R): |(magenta Y)|"
    assert plain("\x1b[2J\x1b[Hclean\x1b]0;title\x07ed \x1b[41mopen") == "cleaned open"


@pytest.mark.parametrize(
    ("space", "text", "value"),
    [
        (gym_spaces.Discrete(4), " 3 ", 3),
        (gym_spaces.Discrete(3, start=-1), "-1", -1),
        (gym_spaces.Box(-2.0, 2.0, (1,)), "0.5", np.array([0.5], np.float32)),
        (gym_spaces.Box(-1.0, 1.0, (2, 2)), "[[0, 1], [-1, 0.5]]", np.array([[0, 1], [-1, 0.5]], np.float32)),
        (gym_spaces.MultiDiscrete([2, 3]), "[1, 2]", np.array([1, 2])),
        (gym_spaces.MultiBinary(3), "[0, 1, 1]", np.array([0, 1, 1], np.int8)),
        (gym_spaces.Text(5), "ab", "ab"),
        (gym_spaces.Tuple([gym_spaces.Discrete(2), gym_spaces.Box(0, 1, (2,))]), "[1, [0, 1]]", None),
        (gym_spaces.Dict({"a": gym_spaces.Discrete(2), "b": gym_spaces.Text(3)}), '{"a": 1, "b": "x"}', None),
    ],
)
def test_actions_of_every_space_are_understood(space: Any, text: str, value: Any) -> None:
    parsed = spaces.parse(space, text)
    assert space.contains(parsed) and spaces.describe(space)
    if value is not None:
        assert np.array_equal(parsed, value)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (gym_spaces.Discrete(4), "4"),
        (gym_spaces.Discrete(4), "true"),
        (gym_spaces.Discrete(4), "1.0"),
        (gym_spaces.Discrete(4), "9" * 5000),
        (gym_spaces.Discrete(4), "[" * 9000),
        (gym_spaces.Box(-2.0, 2.0, (1,)), "[NaN]"),
        (gym_spaces.Box(-2.0, 2.0, (1,)), "1e999"),
        (gym_spaces.Box(-2.0, 2.0, (2,)), "[1]"),
        (gym_spaces.MultiDiscrete([2, 3]), "[1, 2.5]"),
        (gym_spaces.Dict({"a": gym_spaces.Discrete(2)}), '{"b": 1}'),
        (gym_spaces.Text(5), "abcdefghijkl"),
        (gym_spaces.Discrete(4), "1" + " " * 30_000),
    ],
)
def test_what_is_no_action_is_said_and_never_raised_otherwise(space: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|in the space|at most"):
        spaces.parse(space, text)


def test_a_named_action_moves_the_player_and_gold_wins() -> None:
    async def play(family: GymnasiumFamily) -> None:
        task = family.task("train", 0)
        opening, (step, bad), _ = await episode(
            family, task, ["I think. <action>Right</action>", "<action>jump</action>"]
        )
        assert opening[0].content.endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
        assert "one of: left, down, right, up" in opening[0].content
        assert "S[F]FF" in step.messages[0].content and "\x1b" not in step.messages[0].content
        assert "Invalid" in bad.messages[0].content and (bad.reward, bad.info["invalid_share"]) == (-0.5, 0.5)

        steps = await gold_steps(family, task)
        assert (len(steps), steps[-1].reward, steps[-1].success) == (6, 1.0, True)

    with_family(play, *LAKE, "env.options.actions=[left, down, right, up]", "env.options.invalid_reward=-0.5")


def test_one_in_haste_wins_in_few_turns_where_a_patient_one_waits_for_the_ice() -> None:
    """By the game's table 72 % of the hasty walks end well within 12 turns, and 4 % of the patient ones."""

    async def wins(family: GymnasiumFamily) -> int:
        walks = [await gold_steps(family, family.task("train", index), most=12) for index in range(50)]
        return sum(steps[-1].success for steps in walks)

    ice = (*LAKE[:2], "env.options.kwargs={is_slippery: true, success_rate: 0.8}")
    assert with_family(wins, *ice, "env.options.gold_discount=0.95") >= 25
    assert with_family(wins, *ice) <= 10


def test_numbers_are_shown_where_a_game_cannot_print_itself() -> None:
    async def play(family: GymnasiumFamily) -> None:
        task = family.task("eval", 3)
        opening, (step,), _ = await episode(family, task, ["<action>[0.5]</action>"])
        again, _, _ = await episode(family, task, [])
        assert opening == again and "a JSON list of numbers with shape [1], each from -2.0 to 2.0" in opening[0].content
        assert step.messages[0].content.count(",") == 2
        assert step.reward is not None and step.reward < 0

    with_family(play, NAME, "env.options.id=Pendulum-v1")


def test_a_game_goes_on_in_the_next_worker_when_its_worker_is_killed() -> None:
    async def play(family: GymnasiumFamily) -> None:
        environment = family.make()
        await environment.reset(family.task("train", 0))
        await environment.step("<action>2</action>")

        pid = family.pool.workers[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        step = await asyncio.wait_for(environment.step("<action>2</action>"), 60)
        assert "SF[F]F" in step.messages[0].content
        await environment.close()

    with_family(play, *LAKE)


def test_a_step_that_blocks_leaves_the_event_loop_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its game waits for a file that only this loop writes, while the step is under way."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))

    async def play(family: GymnasiumFamily) -> None:
        environment = family.make()
        await environment.reset(family.task("train", 0))
        step = asyncio.ensure_future(environment.step("<action>0</action>"))
        async with asyncio.timeout(60):
            while not gate.with_suffix(".asked").exists():
                await asyncio.sleep(0.01)
        assert not step.done()
        gate.write_text("open")
        assert (await asyncio.wait_for(step, 60)).reward == 1.0
        await environment.close()

    with_family(play, NAME, "env.options.id=tests.envs.blocking_game:Gate-v0")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["env.options.id=FrozenLake-v9"], "FrozenLake-v9"),
        (["env.options.id=Taxi-v4", "env.options.actions=[a, b]"], "wants 6 different names"),
        (["env.options.id=Pendulum-v1", "env.options.actions=[a, b]"], "only a Discrete space"),
        (["env.options.id=CartPole-v1", "env.options.observe=text"], "cannot print itself"),
        (["env.options.id=FrozenLake-v1", "env.options.kwargs={speed: 1}"], "speed"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_at_once(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_family(load_config(None, [NAME, *overrides]))
