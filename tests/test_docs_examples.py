"""The examples of docs/environments.md: each command and each recipe in it is what the command line takes."""

from __future__ import annotations

import asyncio
import re
import shlex
from pathlib import Path

import pytest

from envs.registry import validate_env, validate_options
from launch import preflight
from launch.cli import main, parse
from launch.prepare import Prepared, validate
from rl.config.recipes import SHIPPED
from rl.config.schema import Config, load_config
from tests.envs.test_openenv import counting

DOCUMENT = Path(__file__).parent.parent / "docs" / "environments.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
OWN = """
from tests.envs.seeded_faults import SumFamily

class MyOptions(SumFamily.Options):
    level: int = 1

class MyFamily(SumFamily):
    Options = MyOptions

def my_reward(response: str, row: dict) -> float:
    return float(row["answer"] in response)
"""


def blocks(language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(DOCUMENT.read_text()) if kind == language]


def commands(verb: str) -> list[str]:
    lines = [line.split("#  ")[0].split(" # ")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith(f"fresco {verb}")]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the rows, the module and the recipe that the examples speak of."""

    def prepare(config: Config, *, make: bool, begin: object) -> Prepared:
        validate(config)
        return Prepared(None, 0)

    monkeypatch.setattr(preflight, "prepare", prepare)  # in this process: a child would import torch each time
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    rows = [f'{{"prompt": "{n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(600)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    (tmp_path / "my_module.py").write_text(OWN)
    (tmp_path / "my_recipe.yaml").write_text(f"base: {SHIPPED / 'math_cpu.yaml'}\neval: {{tasks: 32}}\n")
    return tmp_path


@pytest.mark.parametrize("command", [each for each in commands("run") if "openenv" not in each])
def test_a_run_is_planned(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(command)[1:], "--dry-run"]) == 0, capsys.readouterr().err
    assert "the configuration is valid" in capsys.readouterr().out


def test_a_run_on_an_openenv_server_is_planned(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [each for each in commands("run") if "openenv" in each]

    async def plan() -> int:
        async with counting(sessions=4) as (_, overrides):
            (url,) = [each for each in overrides if each.startswith("env.options.url=")]
            words = [url if each.startswith("env.options.url=") else each for each in shlex.split(command)[1:]]
            return await asyncio.to_thread(main, [*words, "--dry-run"])

    assert asyncio.run(plan()) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", commands("env check"))
def test_a_check_knows_its_environment(command: str, here: Path) -> None:
    arguments = parse(shlex.split(command)[1:])
    assert arguments.call == "launch.commands.check_env:check"
    validate_options(load_config(None, [*arguments.overrides, f"env.name={arguments.name}"]))


def test_the_judge_and_the_mixture_of_the_examples_are_valid(here: Path) -> None:
    recipes = blocks("yaml")
    assert len(recipes) == 2
    for recipe in recipes:
        (here / "example.yaml").write_text(recipe)
        validate_env(load_config(here / "example.yaml"), dry=True)
