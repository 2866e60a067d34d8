"""Whole episodes on the Environment protocol, by scripted agents."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from envs.registry import validate_env
from envs.swe import environment as module
from envs.swe import generate
from envs.swe.environment import SweEnvironment, SweFamily, SweOptions
from envs.swe.tasks import SweTask
from rl.config.schema import ConfigError, load_config
from rollout.episodes.environment import Step
from tests.envs.agents import tool_call
from tests.envs.errors import raises_one_line
from tests.envs.sandboxes import PYTHON
from tests.envs.test_swe_tasks import GYM, R2E

SWE = ["env.name=swe", "env.max_turns=30", "env.step_deadline_s=600", "rollout.episode_deadline_s=3600"]


async def scripted(family: SweFamily, task: SweTask, turns: list[str]) -> list[Step]:
    environment = family.make()
    assert isinstance(environment, SweEnvironment)
    opening = await environment.reset(task)
    assert [message.role for message in opening] == ["system", "user"] and "<tools>" in opening[0].content
    steps = [await environment.step(turn) for turn in turns]
    if not steps[-1].done:
        steps.append(await environment.finish())
    await environment.close()
    return steps


def test_scripted_agents(ledger_tasks: Path) -> None:
    """Gold earns 1 and nothing earns 0; a fix by the tools earns 1, also when the turns run out; noise is counted."""
    fix = tool_call("edit", path="ledger/__init__.py", old="index <= rest", new="index < rest")

    async def play() -> None:
        family = SweFamily(SweOptions(source=str(ledger_tasks), eval_count=1, sandboxes=2, threads=2), 0)
        assert (family.task_count("train"), family.task_count("eval")) == (1, 1)
        await family.start()

        task = family.task("train", 0)
        apply = tool_call("bash", command=f"git apply - <<'GOLD'\n{task.gold_patch}GOLD")
        view = tool_call("view", path="ledger/__init__.py")
        gold, nothing, fixed, noise = await asyncio.gather(
            scripted(family, task, [apply, tool_call("submit")]),
            scripted(family, task, [tool_call("submit")]),
            scripted(family, task, [view, f"{fix}{fix}", f"```bash\n{Path(PYTHON).name} -m pytest -q\n```", ""]),
            scripted(family, task, ["?", tool_call("bash"), tool_call("bash", command="false"), "```submit\n```"]),
        )

        assert gold[-1].done and gold[-1].reward == 1 and gold[-1].success
        assert nothing[-1].done and nothing[-1].reward == 0 and nothing[-1].info["submitted"] == 1

        assert fixed[-1].done and fixed[-1].reward == 1 and fixed[-1].success and fixed[-1].info["submitted"] == 0
        assert [message.role for message in fixed[1].messages] == ["tool", "tool"]
        assert "changed" in fixed[1].messages[0].content and "does not occur" in fixed[1].messages[1].content
        assert "passed" in fixed[2].messages[0].content

        last = noise[-1].info
        assert (last["malformed_calls"], last["failed_calls"], last["tool_calls"], last["turns"]) == (2, 1, 3, 4)
        assert noise[-1].reward == 0 and not any(step.success for step in (*nothing, *noise))
        await family.stop()

    asyncio.run(play())


def test_nothing_of_a_turn_that_was_cut_off_is_done(ledger_tasks: Path) -> None:
    """Neither its whole calls nor a submit: what the agent meant to write next is not known."""
    spoil = tool_call("bash", command="echo spoilt > ledger/__init__.py")

    async def play() -> None:
        family = SweFamily(SweOptions(source=str(ledger_tasks), eval_count=1, sandboxes=1, threads=1), 0)
        await family.start()
        environment = family.make()
        await environment.reset(family.task("train", 0))

        step = await environment.step(f"{spoil}{tool_call('submit')}<tool_call>", truncated=True)
        assert not step.done and "none of its calls was made" in step.messages[0].content
        step = await environment.step(tool_call("bash", command="cat ledger/__init__.py"))
        assert "spoilt" not in step.messages[0].content
        await environment.close()
        await family.stop()

    asyncio.run(play())


def test_half_of_the_tests_passed_is_half_a_reward_and_no_success(ledger_tasks: Path) -> None:
    async def play() -> Step:
        family = SweFamily(SweOptions(source=str(ledger_tasks), eval_count=1, threads=1, partial_reward=True), 0)
        await family.start()
        task = family.task("train", 0)
        harder = replace(task, fail_to_pass=(*task.fail_to_pass, "tests/test_ledger.py::test_of_tomorrow"))
        apply = tool_call("bash", command=f"git apply - <<'GOLD'\n{task.gold_patch}GOLD")
        steps = await scripted(family, harder, [apply, tool_call("submit")])
        await family.stop()
        return steps[-1]

    last = asyncio.run(play())
    assert last.reward is not None and 0 < last.reward < 1 and not last.success


def test_a_cancelled_reset_leaves_no_sandbox(ledger_tasks: Path) -> None:
    async def play() -> None:
        family = SweFamily(SweOptions(source=str(ledger_tasks), eval_count=1, sandboxes=1, threads=1), 0)
        await family.start()
        for _ in range(3):
            environment = family.make()
            reset = asyncio.create_task(environment.reset(family.task("train", 0)))
            await asyncio.sleep(0.002)
            reset.cancel()
            await asyncio.gather(reset, return_exceptions=True)
            await environment.close()

        (last,) = await asyncio.wait_for(scripted(family, family.task("train", 0), [tool_call("submit")]), 240)
        assert last.done
        await family.stop()

    asyncio.run(play())


def test_generated_tasks_are_made_once(ledger_tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = generate.generate

    def counted(*arguments: object) -> list[SweTask]:
        made.append(1)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(generate, "generate", counted)

    async def play() -> list[str]:
        options = SweOptions(packages=["ledger"], generated_count=2, eval_count=1, threads=2)
        family = SweFamily(options, 0)
        assert (family.task_count("train"), family.task_count("eval")) == (1, 1)
        await family.start()
        names = [family.task(split, 0).instance_id for split in ("train", "eval")]
        await family.stop()
        return names

    assert asyncio.run(play()) == asyncio.run(play()) and made == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["env.options.packages=[toolzz]"], "'toolzz' is none of toolz"),
        (["env.options.eval_count=48"], "leaves nothing of generated_count=48"),
        (["env.options.source=/no/tasks.jsonl"], "cannot be read"),
        (["env.options.sandbox=lxc"], "env.options.sandbox='lxc'"),
        (["env.max_turns=1"], "env.max_turns=1: no task of env 'swe' is solved in fewer than 2 turns"),
        (["env.options.sandboxes=32"], "env.episodes_per_server=64: more than env.options.sandboxes=32"),
        (["rollout.episode_deadline_s=540"], "rollout.episode_deadline_s=540: a step may take 540 s"),
        (["env.step_deadline_s=300"], "env.step_deadline_s=300: a step may take 540 s"),
    ],
)
def test_options(options: list[str], message: str) -> None:
    with raises_one_line(ConfigError, message):
        validate_env(load_config(None, [*SWE, *options]))


def test_rows_whose_tests_have_no_file_are_refused(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.jsonl"
    good = tmp_path / "good.jsonl"
    mixed.write_text("".join(f"{json.dumps(row)}\n" for row in (GYM, R2E)))
    good.write_text(f"{json.dumps(GYM)}\n")
    for options in (f"source={mixed}", f"source={good} eval_source={mixed}"):
        overrides = [f"env.options.{option}" for option in options.split()]
        parts = ("'expected_output_json'", "'TestA.test_one'", "leave these rows out")
        with raises_one_line(ConfigError, f"{mixed}: 1 of 2 rows are of R2E-Gym", *parts):
            validate_env(load_config(None, [*SWE, "env.options.eval_count=0", *overrides]), dry=True)


def test_long_statements_are_cut(ledger_tasks: Path) -> None:
    async def play() -> str:
        family = SweFamily(SweOptions(source=str(ledger_tasks), eval_count=1, statement_chars=100), 0)
        await family.start()
        environment = family.make()
        opening = await environment.reset(replace(family.task("train", 0), problem_statement="a" * 500 + "z" * 500))
        await environment.close()
        await family.stop()
        return opening[1].content

    assert asyncio.run(play()) == f"{'a' * 50}\n[... 900 characters left out ...]\n{'z' * 50}"
    assert "Fix the issue" in module.SYSTEM_PROMPT
