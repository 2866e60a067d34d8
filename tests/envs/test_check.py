"""`fresco env check`: seeded faults are found by the check that is there for them, sound environments pass."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from envs.check import resources
from envs.check.checks import SHORT, Scope
from envs.check.difficulty import Model, difficulty
from envs.check.findings import Page
from envs.check.player import ByteTokenizer, Player
from envs.check.run import check_environment
from envs.check.watch import Blocked, LoopWatch
from envs.swe.generate import write_tasks
from launch.cli import main
from rl.config.schema import load_config
from tests.envs.playing import with_family
from tests.envs.repositories import FILES, TASK, write_files
from tests.envs.seeded_faults import FAULTS
from tests.envs.test_openenv import counting

pytestmark = pytest.mark.slow

Served = TypeVar("Served")
TINY = Scope(tasks=2, openings=8, episodes=20)
TINIEST = Scope(tasks=1, openings=3, episodes=5)
FAMILY = "env.name=tests.envs.seeded_faults:SumFamily"


def check(*overrides: str, scope: Scope = SHORT) -> Page:
    return check_environment(load_config(None, ["env.max_turns=4", "env.step_deadline_s=2", *overrides]), scope)


def test_a_sound_environment_holds_every_check() -> None:
    page = check(FAMILY, "env.step_deadline_s=30")
    assert [finding for finding in page.findings if finding.verdict != "ok"] == []
    assert "every check holds" in page.text()
    assert {row.agent: row.success for row in page.earned}["the solution"] == 1.0


@pytest.mark.docs
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_found_by_its_check(fault: str) -> None:
    scope = SHORT if FAULTS[fault] == "flat" else TINY  # growth shows over many episodes
    assert FAULTS[fault] in check(FAMILY, f"env.options.fault={json.dumps(fault)}", scope=scope).failed


def test_the_command_prints_the_page_and_says_with_its_code_whether_all_holds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["env", "check", "tests.envs.seeded_faults:SumFamily", "--short", "--out", str(tmp_path / "page.json")]
    assert main([*command, "env.options.fault=the right answer is wrong"]) == 1
    told = capsys.readouterr().out
    assert "FAIL gold" in told and "checks fail: gold" in told
    assert json.loads((tmp_path / "page.json").read_text())["tasks"] == {"train": 500, "eval": 40}

    assert main([*command, "env.options.faults=x"]) == 2
    assert "did you mean 'fault'" in capsys.readouterr().err
    assert main(["env", "check", "tool_loop"]) == 2
    assert "its agent owns the loop" in capsys.readouterr().err


@pytest.mark.docs
def test_maths_and_code_hold_and_noise_is_known_for_what_it_is() -> None:
    page = check("env.name=math", "env.step_deadline_s=30")
    assert page.failed == [], page.text()
    page = check("env.name=code", "env.step_deadline_s=60", scope=TINIEST)
    assert page.failed == [], page.text()
    assert check("env.name=synthetic", "env.step_deadline_s=30").failed == ["cheats"]  # it rewards half of all words


@pytest.mark.docs
def test_games_of_alfworld_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESCO_CACHE", str(tmp_path))
    games = "env.options.games={train: 8, valid_unseen: 4, max_receptacles: 6, clutter: [4, 6]}"
    page = check("env.name=alfworld", games, "env.max_turns=16", "env.step_deadline_s=60", scope=TINIEST)
    assert page.failed == [], page.text()


@pytest.mark.docs
def test_repositories_hold(tmp_path: Path) -> None:
    tasks = [replace(TASK, instance_id=f"ledger-{n}", package="") for n in range(3)]
    write_tasks(tasks, tmp_path / "tasks.jsonl")
    for task in tasks:
        write_files(FILES, tmp_path / "repositories" / task.instance_id)

    source = [f"env.options.source={tmp_path / 'tasks.jsonl'}", f"env.options.repositories={tmp_path / 'repositories'}"]
    options = [*source, "env.options.eval_count=1", "env.options.test_s=120", "env.step_deadline_s=400"]
    page = check("env.name=swe", *options, "env.max_turns=2", scope=TINIEST)
    assert page.failed == ["tasks differ"], page.text()  # two copies of one task


@pytest.mark.docs
def test_games_of_gymnasium_hold() -> None:
    options = ["env.options.id=Taxi-v4", "env.options.success_return=0.5", "env.options.eval_tasks=8"]
    page = check("env.name=gymnasium", *options, "env.max_turns=20", "env.step_deadline_s=30", scope=TINIEST)
    assert page.failed == [], page.text()


@pytest.mark.parametrize(("slippery", "failed"), [("true", []), ("false", ["tasks differ"])])
def test_a_lake_has_different_tasks_only_if_it_is_slippery(slippery: str, failed: list[str]) -> None:
    """A fixed script is no action there, and meets the same in every task; the solution of one does not."""
    lake = f"{{id: FrozenLake-v1, kwargs: {{is_slippery: {slippery}, success_rate: 0.9}}, gold_discount: 0.95,"
    options = f"env.options={lake} bare: true, actions: [left, down, right, up], eval_tasks: 8}}"
    page = check("env.name=gymnasium", options, "env.max_turns=16", "env.step_deadline_s=30", scope=TINY)
    assert page.failed == failed, page.text()


def test_rows_with_rewards_hold() -> None:
    options = "env.options={source: 'experiments.own_reward:rows', eval_count: 20, reward: exact}"
    page = check("env.name=dataset", options, "env.step_deadline_s=30", scope=TINY)
    assert page.failed == [], page.text()


def test_a_server_of_openenv_holds_and_nobody_knows_its_solution() -> None:
    with in_a_thread(counting(sessions=8)) as (counter, overrides):
        page = check(*overrides, "env.options.tasks=43", "env.options.eval_tasks=8", scope=TINY)
    assert page.failed == [] and counter.refused == 0, page.text()
    assert {each.check: each.verdict for each in page.findings}["gold"] == "note"


@contextmanager
def in_a_thread(server: AbstractAsyncContextManager[Served]) -> Iterator[Served]:
    """A server with an event loop of its own, for a check that runs one itself."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
    finally:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


@pytest.mark.docs
def test_data_sets_of_reasoning_gym_hold_in_a_mixture_too() -> None:
    """Among them a game that takes bare words, for which the script of the check is no action."""
    chain = "{env: reasoning_gym, options: {dataset: chain_sum, tasks: 200}}"
    lake = "{id: FrozenLake-v1, kwargs: {success_rate: 0.9}, bare: true, actions: [left, down, right, up]}"
    games = f"{{env: gymnasium, options: {lake}}}"
    members = f"{{sums: {{env: math, options: {{tasks: 200}}}}, chains: {chain}, lake: {games}}}"
    limits = ["env.max_turns=20", "env.step_deadline_s=30"]
    page = check("env.name=mixture", f"env.options.members={members}", *limits, scope=TINY)
    assert page.failed == [], page.text()
    said = {each.check: each.said for each in page.findings}
    assert said["tasks differ"] == "100% of 8 differ" and said["held out"].startswith("0%")


def test_difficulty_is_counted_in_tenths_of_the_tries_that_succeed() -> None:
    """A scripted model that knows every second answer in half of its tries."""
    tries: dict[str, int] = {}

    async def complete(text: str) -> str:
        opening = text.splitlines()[0]
        left, right = (int(word) for word in opening.split("?")[0].split(" + "))
        tries[opening] = tries.get(opening, 0) + 1
        knows = left % 2 == 0 and tries[opening] % 4 < 2
        return f"<answer>{left + right if knows else 0}</answer>"

    async def run(family: Any) -> list[int]:
        player = Player(family, load_config(None, ["env.max_turns=4"]))
        return await difficulty(player, range(20), Model(complete))

    histogram = with_family(run, FAMILY)
    assert sum(histogram) == 20 and {place for place, count in enumerate(histogram) if count} <= {0, 5}
    assert histogram[0] and histogram[5]


def test_what_takes_the_loop_is_named_and_interrupted() -> None:
    async def run() -> str:
        with LoopWatch(deadline_s=1.5) as watch:
            await asyncio.sleep(0.3)
            assert not watch.found
            with pytest.raises(Blocked):
                sleep_on_the_loop()
        return watch.found

    assert "sleep_on_the_loop" in asyncio.run(run())


def sleep_on_the_loop() -> None:
    time.sleep(60)


def test_the_tokenizer_of_a_check_reads_what_it_has_written() -> None:
    """Else a long turn costs seconds, which the environment would be blamed for."""
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("<answer>½</answer>")
    assert {read(ids) for read in (tokenizer.decode, tokenizer.turn_text, tokenizer.raw)} == {"<answer>½</answer>"}


def test_growth_is_named_beyond_what_caches_may_take() -> None:
    before = resources.Held(3, 10, 40, 2, 0, 100 << 20)
    assert before.growth(resources.Held(3, 11, 45, 2, 1, 110 << 20), episodes=800) == []
    grown = before.growth(resources.Held(903, 10, 40, 2, 0, 400 << 20), episodes=800)
    assert grown == ["processes from 3 to 903", "memory by 300 MB (393 kB an episode)"]
