"""ALFWorld's games, engine and workers, against the package's own engine and environment."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredTWEnv
from alfworld.gen import constants
from mementos import core as mementos
from textworld.envs.pddl import PddlEnv

from envs.alfworld.demonstrations import demonstrate
from envs.alfworld.engine import NOTHING, Engine, GameCache, Observation, PreparedGame
from envs.alfworld.environment import AlfworldFamily, AlfworldOptions, object_kind, parse_action
from envs.alfworld.games import GameRecipe, GamesError, ensure_games, list_games
from envs.alfworld.requests import GameRequest
from envs.alfworld.scenes import TASK_TYPES, TREATMENTS
from envs.alfworld.translation import kept_translation, read_game
from envs.workers.process import RequestLost
from rollout.episodes.environment import ChatMessage

pytestmark = pytest.mark.slow

RECIPE = GameRecipe(train=6, valid_unseen=6, max_receptacles=7, clutter=(4, 8), seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_games(RECIPE, tmp_path_factory.mktemp("alfworld") / "games", workers=2)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


def stock() -> AlfredDemangler:
    if sys.version_info >= (3, 13):
        pytest.skip("the stock engine of textworld 1.7.0 sets variables through locals(), which Python 3.13 ignores")
    return AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)))


def walkthrough(path: Path) -> list[str]:
    commands: list[str] = json.loads(path.read_text())["walkthrough"]
    return commands


def test_all_six_task_types_in_scenes_kept_apart(folder: Path) -> None:
    train = list_games(folder, "train")
    unseen = list_games(folder, "valid_unseen")
    assert {game.task_type for game in train} == {game.task_type for game in unseen} == set(TASK_TYPES)
    assert {game.scene for game in train} <= set(constants.TRAIN_SCENE_NUMBERS)
    assert {game.scene for game in unseen} <= set(constants.TEST_SCENE_NUMBERS)
    problems = [json.loads(game.path.read_text())["pddl_problem"] for game in [*train, *unseen]]
    assert len(set(problems)) == RECIPE.train + RECIPE.valid_unseen


def test_the_packages_environment_lists_the_same_games(folder: Path) -> None:
    config = {
        "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6]},
        "dataset": {
            "data_path": str(folder / "train"),
            "eval_ood_data_path": str(folder / "valid_unseen"),
            "num_train_games": -1,
            "num_eval_games": -1,
        },
    }
    for split, theirs in (("train", "train"), ("valid_unseen", "eval_out_of_distribution")):
        listed = AlfredTWEnv(config, train_eval=theirs).game_files
        assert sorted(listed) == [str(game.path) for game in list_games(folder, split)]


def test_transcripts_are_those_of_the_stock_engine_and_walkthroughs_win_there(folder: Path, engine: Engine) -> None:
    """Admissible, inadmissible and repeated commands; every game is won in the end, and none at its start."""
    player = stock()
    game_cache = GameCache(8)

    for game in list_games(folder, "train"):
        rng = random.Random(game.path.name)
        player.load(str(game.path))
        theirs = player.reset()
        ours = engine.load(game_cache.get(game.path))
        assert not theirs["won"]

        for command in [None, "jump", "look", "inventory", *(None,) * 2, *walkthrough(game.path)]:
            assert (theirs.feedback, tuple(theirs["admissible_commands"])) == (ours.text, ours.commands)
            chosen = command or rng.choice([each for each in ours.commands if each.startswith(("exa", "hel", "loo"))])
            theirs = player.step(chosen)[0]
            ours = engine.step(chosen)
            assert (theirs.feedback, theirs["won"]) == (ours.text, ours.won)
        assert ours.won


def test_blanks_count_within_a_command_and_not_around_it(folder: Path, engine: Engine) -> None:
    """As in the stock engine, which is asked the same; through the environment's own reading of a turn as well."""
    player = stock()
    game = list_games(folder, "train")[0].path
    prepared = GameCache(1).get(game)
    command = walkthrough(game)[0]
    inner = [command.replace(" ", blanks, 1) for blanks in ("  ", "\t", " \t", "\u00a0")]
    outer = [f" {command}", f"{command}\t ", command]

    for typed in [*inner, *outer]:
        player.load(str(game))
        player.reset()
        theirs = player.step(typed)[0].feedback
        assert (theirs == NOTHING) == (typed in inner)

        for written in (typed, parse_action(typed, "line"), parse_action(f"<action>{typed}</action>", "tag")):
            engine.load(prepared)
            assert engine.step(written).text == theirs


def test_going_where_one_stands_is_inadmissible(folder: Path, engine: Engine) -> None:
    first = engine.load(GameCache(1).get(list_games(folder, "train")[0].path))
    command = next(each for each in first.commands if each.startswith("go to"))
    there = engine.step(command)
    assert command not in there.commands
    assert engine.step(command).text == NOTHING and engine.observation == there


def test_what_the_package_leaves_out_is_left_out(folder: Path, tmp_path: Path) -> None:
    game = list_games(folder, "train")[0].path
    for name in ("plain", "movable-1", "AppleSliced-2", "no-trajectory"):
        place = tmp_path / "train" / name / "trial"
        shutil.copytree(game.parent, place)
    (tmp_path / "train" / "no-trajectory" / "trial" / "traj_data.json").unlink()
    config = {
        "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6]},
        "dataset": {"data_path": str(tmp_path / "train"), "num_train_games": -1},
    }
    kept = [str(tmp_path / "train" / "plain" / "trial" / game.name)]
    assert AlfredTWEnv(config, train_eval="train").game_files == kept
    assert [str(each.path) for each in list_games(tmp_path, "train")] == kept


def test_what_the_task_types_need(folder: Path, engine: Engine) -> None:
    """Two things are moved, not "put"; no appliance is opened; the desk lamp alone can be used."""
    game_cache = GameCache(8)
    for game in list_games(folder, "train"):
        plan = walkthrough(game.path)
        kind = game.task_type
        verbs = [command.split()[0] for command in plan]
        engine.load(game_cache.get(game.path))
        admitted = set[str]()
        for command in plan:
            admitted |= {each for each in engine.observation.commands if each.startswith(("use", "put"))}
            assert engine.step(command).admissible

        assert engine.observation.won
        assert all(each.startswith("use desklamp ") for each in admitted)
        if kind == "look_at_obj_in_light":
            assert plan[-1] in admitted
        else:
            assert verbs.count("move") == (2 if kind == "pick_two_obj_and_place" else 1) and verbs[-1] == "move"
        if kind in TREATMENTS:
            before = plan[: verbs.index(kind.split("_")[1])]
            assert before[-1].startswith(f"go to {TREATMENTS[kind][1].lower()} ")


def test_every_listed_command_is_taken_as_a_player_types_it(folder: Path, tmp_path: Path, engine: Engine) -> None:
    """In every state on the way to the goal, also without the blank that names without a number end in."""
    game_cache = GameCache(8)
    unnumbered = tmp_path / "game.tw-pddl"
    games = [game.path for game in list_games(folder, "train")]
    content = games[0].read_text()
    receptacle = re.search(r"\w+_bar_\w+(?= - receptacle)", content)
    assert receptacle
    unnumbered.write_text(content.replace(receptacle[0], "strongbox"))

    for path, plan in [(unnumbered, [])] + [(path, walkthrough(path)) for path in games]:
        prepared = game_cache.get(path)
        for done in range(max(1, len(plan))):
            listed = replay(engine, prepared, plan[:done]).commands
            assert path in games or "go to strongbox " in listed
            for command in listed:
                replay(engine, prepared, plan[:done])
                assert engine.step(command.strip()).admissible, (command, plan[:done])


def replay(engine: Engine, prepared: PreparedGame, commands: list[str]) -> Observation:
    observation = engine.load(prepared)
    for command in commands:
        observation = engine.step(command)
    return observation


def test_loading_again_is_a_fresh_start_without_a_leak(folder: Path, engine: Engine) -> None:
    prepared = GameCache(1).get(list_games(folder, "train")[0].path)
    first = engine.load(prepared)
    engine.step(first.commands[0])
    assert engine.load(prepared) == first
    for _ in range(100):
        engine.load(prepared)
    before = resident_bytes()
    for _ in range(300):
        engine.load(prepared)
    assert resident_bytes() - before < 100 << 20  # a leak of 1.7 MB per reset would be 510 MB


def test_what_textworld_remembers_is_bounded_and_not_missed(
    folder: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A game that was prepared before goes on with new facts beside its own."""
    paths = [game.path for game in list_games(folder, "train")[:3]]
    kept = [PreparedGame(game := read_game(path), kept_translation(game)) for path in paths]
    played = [replay(engine, prepared, walkthrough(path)) for path, prepared in zip(paths, kept, strict=True)]
    assert all(seen.won for seen in played)

    monkeypatch.setattr("envs.alfworld.engine.FACTS_REMEMBERED", 0)
    sizes = []
    for path in paths:
        fresh = PreparedGame(game := read_game(path), kept_translation(game))
        assert replay(engine, fresh, walkthrough(path)).won
        sizes.append(len(mementos._memento_cache))
    assert [replay(engine, game, walkthrough(path)) for path, game in zip(paths, kept, strict=True)] == played
    assert max(sizes) < 10_000  # of one game: the ones before are forgotten


def test_translating_keeps_the_arguments_of_the_process(folder: Path) -> None:
    arguments = list(sys.argv)
    GameCache(1).get(list_games(folder, "train")[1].path)
    assert sys.argv == arguments


def test_the_same_recipe_makes_the_same_games_once(folder: Path, tmp_path: Path) -> None:
    recipe = RECIPE.model_copy(update={"train": 2, "valid_unseen": 0})
    assert ensure_games(RECIPE, folder) == folder
    again = ensure_games(recipe, tmp_path / "again", workers=1)
    for game in list_games(again, "train"):
        assert (folder / game.path.relative_to(again)).read_text() == game.path.read_text()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(GamesError, match="holds files"):
        ensure_games(RECIPE, tmp_path)


@pytest.mark.parametrize(
    ("text", "form", "command"),
    [
        ("think\nGo to  Desk 1 ", "line", "go to  desk 1"),
        ("", "line", ""),
        ("> look", "line", "look"),
        ("so <action>open drawer 1</action> or <action>\nlook </action>", "tag", "look"),
        ("look", "tag", ""),
    ],
)
def test_actions_are_found(text: str, form: str, command: str) -> None:
    assert parse_action(text, form) == command


def play(folder: Path, scenario: Callable[[AlfworldFamily], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        family = AlfworldFamily(AlfworldOptions(data=folder, **options), 0)
        await family.start()
        try:
            await scenario(family)
        finally:
            await family.stop()

    asyncio.run(run())


def test_episode_reward_invalid_actions_and_step_limit(folder: Path) -> None:
    async def scenario(family: AlfworldFamily) -> None:
        environment = family.make()
        opening = await environment.reset(family.task("train", 0))
        assert opening[-1].content.startswith("You are in the middle of a room.")
        assert "\nCommands: " in opening[-1].content
        bad = await environment.step("")
        assert NOTHING in bad.messages[0].content
        assert not bad.done and bad.info["unparsed"] == 1
        assert (await environment.step("fly to the moon")).info["invalid_actions"] == 2
        cut = await environment.step("inventory", truncated=True)
        assert NOTHING in cut.messages[0].content and not cut.success, "a command that was cut off is none"
        for command in walkthrough(family.task("train", 0).path):
            step = await environment.step(command)

        assert step.done and step.reward == 1 and step.success and step.info["invalid_actions"] == 3
        await environment.close()
        loser = family.make()
        await loser.reset(family.task("train", 1))
        steps = [await loser.step("look") for _ in range(12)]
        assert [step.done for step in steps] == [False] * 11 + [True] and steps[-1].reward == 0
        await loser.close()

    play(folder, scenario, admissible=True, max_steps=12)


def test_the_first_taking_of_what_the_task_asks_for_is_paid_once(folder: Path) -> None:
    async def scenario(family: AlfworldFamily) -> None:
        for index in range(4):
            game = family.task("train", index)
            environment = family.make()
            await environment.reset(game)
            rewards = []
            texts = []

            for command in walkthrough(game.path):
                step = await environment.step(command)
                rewards.append(step.reward or 0.0)
                texts.append(step.messages[0].content)
                if step.reward == 0.25:  # put it back, and take it again
                    thing, place = re.fullmatch(r"take (.+) from (.+)", command).groups()  # type: ignore[union-attr]
                    back = await environment.step(f"move {thing} to {place}")
                    again = await environment.step(command)
                    assert again.messages == step.messages and back.reward == again.reward == 0
            assert sorted(rewards)[-2:] == [0.25, 1] and sum(rewards) == 1.25
            assert f"You pick up the {object_kind(game)} " in texts[rewards.index(0.25)]
            await environment.close()

    play(folder, scenario, progress_reward=0.25)


def test_makers_of_games_die_with_their_parent_and_the_next_one_clears_up(tmp_path: Path) -> None:
    """Killed while it makes games: no process goes on, and what it left is gone when the games are made."""
    recipe = RECIPE.model_copy(update={"train": 400})
    script = (
        "from envs.alfworld.games import *; "
        f"ensure_games(GameRecipe(**{recipe.model_dump()}), Path({str(tmp_path / 'games')!r}), 2)"
    )
    maker = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL)

    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob(".games.draft-*/games/train/*")):
            assert maker.poll() is None and time.monotonic() < deadline, "the maker writes no game"
            time.sleep(0.05)
        children = psutil.Process(maker.pid).children(recursive=True)
        assert len(children) >= 2
    finally:
        maker.kill()
        maker.wait()

    assert not psutil.wait_procs(children, timeout=240)[1]
    ensure_games(RECIPE, tmp_path / "games", workers=1)
    assert not list(tmp_path.glob(".games.draft-*"))


def test_a_reset_before_the_workers_run_or_after_their_end_says_so(folder: Path) -> None:
    async def scenario(family: AlfworldFamily) -> None:
        await family.stop()
        environment = family.make()
        with pytest.raises(RuntimeError, match=r"await family\.start"):  # not a wait without an end
            await environment.reset(family.task("train", 0))

    play(folder, scenario)


def test_a_killed_worker_loses_no_idle_game_and_a_hung_one_only_what_it_played(folder: Path) -> None:
    async def scenario(family: AlfworldFamily) -> None:
        worker = family.pool.workers[0]
        games = [family.make() for _ in range(4)]
        plans = [walkthrough(family.task("train", index).path) for index in range(4)]
        await asyncio.gather(*(game.reset(family.task("train", index)) for index, game in enumerate(games)))
        await asyncio.gather(*(game.step(plan[0]) for game, plan in zip(games, plans, strict=True)))
        before = await asyncio.gather(*(game.step("look") for game in games))
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        after = await asyncio.gather(*(game.step("look") for game in games))
        assert [step.messages for step in after] == [step.messages for step in before]

        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        hung = await asyncio.gather(*(game.step("look") for game in games), return_exceptions=True)
        lost = [isinstance(step, RequestLost) for step in hung]
        assert lost == [True, False, False, False] and worker.restarts == 2
        for game, plan in list(zip(games, plans, strict=True))[1:]:
            for command in plan[1:]:
                step = await game.step(command)
            assert step.reward == 1
        for game in games:
            await game.close()
        assert worker.load == 0

    play(folder, scenario, request_deadline_s=15.0)


def test_a_hang_is_laid_to_the_game_that_hangs_not_to_one_whose_reply_was_held(folder: Path, tmp_path: Path) -> None:
    endless = tmp_path / "game.tw-pddl"
    os.mkfifo(endless)

    async def scenario(family: AlfworldFamily) -> None:
        environment = family.make()
        await environment.reset(family.task("train", 0))
        seen = await environment.step("look")
        worker = family.pool.workers[0]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)  # so that it finds both requests at once

        looking = asyncio.ensure_future(environment.step("look"))
        loading = asyncio.ensure_future(family.pool.open().ask(GameRequest("load", str(endless))))
        await asyncio.sleep(0)
        os.kill(worker.pid, signal.SIGCONT)
        with pytest.raises(RequestLost, match=r"did not answer in 10 s, asked .*'.*game\.tw-pddl'"):
            await loading
        assert (await looking).messages == seen.messages and worker.restarts == 1
        await environment.close()

    play(folder, scenario, request_deadline_s=10.0)


def test_observations_are_cut_and_repeated_as_asked(folder: Path) -> None:
    async def scenario(family: AlfworldFamily) -> None:
        environment = family.make()
        opening: list[ChatMessage] = await environment.reset(family.task("train", 0))
        assert opening[-1].content.endswith(" ...") and len(opening[-1].content.split()) == 9
        await environment.step("inventory")
        step = await environment.step("jump")
        assert step.messages[0].content == f"> inventory\nYou are not carrying anything.\n{NOTHING}"
        await environment.close()

    play(folder, scenario, history=1, max_words=8)


def test_many_environments_at_once_play_as_one_alone(folder: Path, engine: Engine) -> None:
    """The engine is not thread-safe: interleaved games must not touch each other, in a worker or across two."""
    game_cache = GameCache(8)

    def alone(path: Path, seed: int) -> list[tuple[str, str]]:
        rng = random.Random(seed)
        seen = engine.load(game_cache.get(path))
        transcript = []
        for _ in range(10):
            command = rng.choice(seen.commands).strip()
            seen = engine.step(command)
            transcript.append((command, seen.text))
        return transcript

    async def scenario(family: AlfworldFamily) -> None:
        games = [family.task("train", index % 6) for index in range(24)]
        expected = [alone(game.path, seed) for seed, game in enumerate(games)]

        async def one(index: int) -> None:
            environment = family.make()
            await environment.reset(games[index])
            for command, text in expected[index]:
                assert (await environment.step(command)).messages == [ChatMessage("user", text)]
            await environment.close()

        await asyncio.gather(*(one(index) for index in range(24)))

    play(folder, scenario, workers=2)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_translation_is_kept_on_disk_and_made_again_if_it_is_damaged(folder: Path, tmp_path: Path) -> None:
    game = read_game(list_games(folder, "train")[0].path)
    made = kept_translation(game, tmp_path)
    kept = kept_translation(game, tmp_path)
    (path,) = (each for each in tmp_path.rglob("*") if each.is_file())
    whole = path.read_bytes()

    path.write_bytes(b"cut")
    after_cut = kept_translation(game, tmp_path)
    name = next(iter(made.type_of)).encode()
    path.write_bytes(whole.replace(name, name.swapcase(), 1))  # still a translation, of another game
    after_change = kept_translation(game, tmp_path)
    assert path.read_bytes() == whole
    assert made == kept == after_cut == after_change and made.facts and made.types and made.parameters and made.fluents


@pytest.mark.parametrize("action", ["line", "tag"])
def test_the_demonstrator_wins_in_the_real_engine_and_writes_what_the_environment_reads(
    folder: Path, action: str
) -> None:
    async def scenario(family: AlfworldFamily) -> None:
        played = await demonstrate(family, 6, seed=0, mistakes=0.3, max_turns=50)
        assert len(played) >= 5
        for episode in played:
            assert all(("<action>" in turn.action) == (action == "tag") for turn in episode.turns)
            assert episode.turns[-1].imitate

    play(folder, scenario, action=action)
