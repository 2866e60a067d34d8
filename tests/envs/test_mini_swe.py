"""mini-swe-agent through the gateway: by a stand-in for its package, and by itself where it is installed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from envs.agents.mini_swe import MiniSweFamily, MiniSweOptions, demonstrate, gold_command
from envs.sandbox import SandboxError
from envs.swe.tasks import file_diff
from rollout.episodes.parsing import HermesParser
from rollout.episodes.tokenizer import ChatTokenizer
from tests.envs.repositories import TASK
from tests.envs.sandboxes import PYTHON
from tests.envs.test_gateway import Rig, chat, run  # noqa: F401

INSTALLED = MiniSweOptions().python

# What run_mini_swe.py takes from the package, as little as will do.
STAND_IN = {
    "agents/default.py": """
import json, os, subprocess, urllib.request

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {}}}

class DefaultAgent:
    def __init__(self, model, env, system_template, instance_template, step_limit, cost_limit):
        self.instance, self.limit, self.n_calls = instance_template, step_limit, 0

    def run(self, task):
        messages = [{"role": "user", "content": self.instance.replace("{{task}}", task)}]
        while self.n_calls < self.limit:
            self.n_calls += 1
            body = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode()
            head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
            url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
            with urllib.request.urlopen(urllib.request.Request(url, body, head)) as answer:
                message = json.load(answer)["choices"][0]["message"]
            (call,) = message["tool_calls"]
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(command, shell=True, capture_output=True, text=True)
            if "COMPLETE_TASK" in done.stdout:
                return {"exit_status": "Submitted"}
            messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": done.stdout}]
        return {"exit_status": "LimitsExceeded"}
""",
    "environments/local.py": "class LocalEnvironment:\n    def __init__(self, timeout): ...\n",
    "models/litellm_model.py": "class LitellmModel:\n    def __init__(self, **settings): ...\n",
}


@pytest.fixture(params=["stand-in", "installed"])
def python(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "installed":
        if not INSTALLED.exists():
            pytest.skip("mini-swe-agent is not installed here (docs/agents.md)")
        return INSTALLED

    venv = tmp_path / "venv"
    site = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages" / "minisweagent"
    for name, text in STAND_IN.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    (venv / "bin").mkdir()
    (venv / "bin" / "python").symlink_to(PYTHON)
    (venv / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix).resolve() / 'bin'}\n")
    return venv / "bin" / "python"


def options(ledger_tasks: Path, python: Path) -> MiniSweOptions:
    return MiniSweOptions(
        source=str(ledger_tasks), eval_count=1, sandboxes=2, threads=2, python=python, statement_chars=400
    )


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "bash", "arguments": {json.dumps({"command": command})}}}\n</tool_call>'


SUBMIT = call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def test_its_fix_is_judged_by_the_tests(chat: ChatTokenizer, ledger_tasks: Path, python: Path) -> None:  # noqa: F811
    async def scene(rig: Rig) -> None:
        family = MiniSweFamily(options(ledger_tasks, python), 0)
        await family.start()
        task = family.task("train", 0)
        fix = gold_command(task)
        assert fix is not None
        try:
            rig.says = [call(fix), SUBMIT]
            solved = await family.make().run(task, rig.endpoint)
            assert (solved.reward, solved.success) == (1.0, True)
            assert solved.info["submitted"] == 1 and solved.info["turns"] == 2

            rig.says = [call("echo nothing"), SUBMIT]
            idle = await family.make().run(task, rig.endpoint)
            assert (idle.reward, idle.success, idle.info["submitted"]) == (0.0, False, 1.0)
        finally:
            await family.stop()
        assert len(rig.session.forest.turns) == 4 and set(rig.session.forest.forks) <= {
            "edited",
            "subagent",
            "compacted",
        }

    run(chat, scene, tokens=1000)


def test_an_agent_that_breaks_is_judged_by_what_it_did(chat: ChatTokenizer, ledger_tasks: Path, tmp_path: Path) -> None:  # noqa: F811
    """An environment without the package: nothing was done, nothing is earned, and the sandbox is free again."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.symlink_to(PYTHON)
    (tmp_path / "venv" / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix).resolve() / 'bin'}\n")

    async def scene(rig: Rig) -> None:
        family = MiniSweFamily(options(ledger_tasks, python), 0)
        await family.start()
        try:
            for _ in range(3):  # more than there are sandboxes
                outcome = await family.make().run(family.task("train", 0), rig.endpoint)
                assert (outcome.reward, outcome.info["failed"]) == (0.0, 1.0)
        finally:
            await family.stop()

    run(chat, scene, tokens=1000)


def test_where_it_is_not_installed_one_line_says_how(ledger_tasks: Path, tmp_path: Path) -> None:
    family = MiniSweFamily(options(ledger_tasks, tmp_path / "nowhere" / "bin" / "python"), 0)
    with pytest.raises(SandboxError, match=r"env.options.python=.*: no such interpreter; make it with .*mini_swe.txt"):
        asyncio.run(family.start())


def test_demonstrations_fix_what_they_show(ledger_tasks: Path, tmp_path: Path) -> None:
    family = MiniSweFamily(options(ledger_tasks, tmp_path), 0)
    shown = asyncio.run(demonstrate(family, 3, seed=0, mistakes=0.0, max_turns=3))
    assert len(shown) == 3
    for demonstration in shown:
        ((name, arguments),) = HermesParser().parse(demonstration.turns[0].action).calls
        assert name == "bash" and json.loads(arguments)["command"] == gold_command(family.task("train", 0))


OLD = "".join(f"line {n}\n" for n in range(40))
EDITS = {
    "one line": OLD.replace("line 7\n", "seven\n"),
    "several places": OLD.replace("line 2\n", "").replace("line 9\n", "9\nand more\n").replace("line 38\n", "last\n"),
    "at the ends": "first\n" + OLD.replace("line 39\n", ""),
    "grown": OLD.replace("line 20\n", "line 20\nnew\n"),
}


@pytest.mark.parametrize("new", EDITS.values(), ids=EDITS)
def test_the_gold_command_is_the_gold_patch(tmp_path: Path, new: str) -> None:
    (tmp_path / "a.txt").write_text(OLD)
    command = gold_command(replace(TASK, gold_patch=file_diff("a.txt", OLD, new)))
    assert command is not None
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert (tmp_path / "a.txt").read_text() == new
    assert gold_command(replace(TASK, gold_patch=file_diff("a.txt", "", new))) is None
