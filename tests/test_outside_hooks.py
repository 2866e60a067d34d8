"""Hooks of a user's own module, one for each role: loaded in production and in the simulator, with the same effect."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from rl.config.hooks import make_hooks
from rl.config.schema import ConfigError, load_config
from rl.config.section import Named
from rl.observe.trace import read_trace
from rl.observe.trace_events import Answered, Requested, SamplingBegan
from rollout.episodes.hooks import GENERATE, STEP, Call, EpisodeHook, EpisodeHooks
from rollout.simulate.recipe import Given, assumed, scenario_of
from rollout.simulate.simulation import Simulation
from tests import outside_hooks
from tests.test_end_to_end_simulated import check_books, finish, start

MODULE = outside_hooks.__name__
TWO_TURNS = ["join", str(GENERATE), str(STEP), str(GENERATE), str(STEP), "leave"]


def setting(folder: Path) -> str:
    return f"rollout.hooks=[{{{MODULE}:Away: {{server: 1}}}}, {MODULE}:Last, {{{MODULE}:Notes: {{folder: {folder}}}}}]"


def lives(folder: Path) -> list[list[str]]:
    """What each episode noted, of all processes together. A ticket belongs to one of them."""
    notes: defaultdict[str, list[str]] = defaultdict(list)
    for file in folder.iterdir():
        for line in file.read_text().splitlines():
            ticket, what = line.split()
            notes[ticket].append(what)
    return list(notes.values())


def answers_of_two(run: Path) -> list[int]:
    """Which generator answered each request that was made once the second one had worked: both were up then."""
    both = False
    since: dict[int, bool] = {}
    answers = []
    for record in read_trace(run / "simulated"):
        match record.event:
            case SamplingBegan():
                both |= record.source.index == 1
            case Requested(ticket):
                since[ticket] = both
            case Answered(ticket, _, generator) if since[ticket]:
                answers.append(generator)
    return answers


def test_each_role_loads_its_own_in_a_run(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    summary = finish(start(tmp_path, setting(notes)), tmp_path)
    check_books(summary, steps=20)
    assert summary["broker"]["hooks"] == {"batches_seen": 20}
    assert len(list(notes.iterdir())) == 1, "the broker keeps the other server idle"

    played = lives(notes)
    assert len(played) >= 20 * 16 and TWO_TURNS in played

    answers = answers_of_two(tmp_path)
    assert len(answers) > 30 and set(answers) == {1}


def test_the_simulator_loads_them_all(tmp_path: Path) -> None:
    config = load_config("experiments/simulated.yaml", [setting(tmp_path)])
    simulation = Simulation(scenario_of(config, assumed(config, Given())).with_broker(steps=5))
    result = simulation.run()
    simulation.broker.ledger.check()
    assert result.report["hooks"] == {"batches_seen": 5}
    assert simulation.broker.servers.by_index[1].suspended

    played = lives(tmp_path)
    assert len(played) >= 5 * 16 and TWO_TURNS in played
    assert [generator.tokens > 0 for generator in simulation.generators] == [False, True]


def test_without_a_name_nothing_is_loaded() -> None:
    config = load_config("experiments/simulated.yaml")
    simulation = Simulation(scenario_of(config, assumed(config, Given())))
    assert config.rollout.hooks == [] and simulation.broker.hooks == []


def test_a_role_makes_its_own_alone_and_refuses_what_is_wrong_with_another() -> None:
    named: list[Named] = ["pin_prompts", {f"{MODULE}:Away": {"server": -1}}]
    with pytest.raises(ConfigError, match=rf"rollout\.hooks\.{MODULE}:Away\.server=-1: .*greater than or equal to 0"):
        make_hooks("proxy", named, {}, None)
    assert [type(hook).__name__ for hook in make_hooks("proxy", named[:1], {}, None)] == ["PinPrompts"]
    assert make_hooks("broker", named[:1], None) == []


def test_an_episode_goes_on_when_all_of_its_hooks_let_it() -> None:
    held: list[Call] = []
    asked: list[str] = []

    class Holding(EpisodeHook):
        def arrive(self, ticket_id: int, phase: int, go_on: Call) -> None:
            asked.append(self.options)
            held.append(go_on)

    hooks = EpisodeHooks([Holding("first", held.append, held.append), Holding("second", held.append, held.append)])
    went_on: list[bool] = []
    hooks.arrive(1, GENERATE, lambda: went_on.append(True))
    assert asked == ["first"]
    held.pop()()
    assert asked == ["first", "second"] and not went_on
    held.pop()()
    assert went_on == [True]
