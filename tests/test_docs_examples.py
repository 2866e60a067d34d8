"""Every block of every page: what it tells to write is written, and what it tells to run is planned, or run.

A plain `pytest` plans; `pytest -m docs` runs each page from its first block to its last in a copy of the repository,
with runs of two steps. A block that needs more than a test has says so above itself (`tests/documents.py`).
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from algos import registry
from envs.registry import validate_env, validate_options
from launch import preflight
from launch.cli import main, parse
from launch.prepare import Prepared, validate
from rl.config.schema import Config, load_config
from tests.documents import PAGES, ROOT, Block, blocks
from tests.envs.test_openenv import counting

OWN = """
from tests.envs.seeded_faults import SumFamily

class MyOptions(SumFamily.Options):
    level: int = 1

class MyFamily(SumFamily):
    Options = MyOptions

def my_reward(response: str, row: dict) -> float:
    return float(row["answer"] in response)
"""
ROWS = "".join(f'{{"prompt": "{n} + {n}?", "question": "{n} + {n}?", "answer": "{2 * n}"}}\n' for n in range(600))
GIVEN = {
    "rows.jsonl": ROWS,
    "my_module.py": OWN,
    "my_recipe.yaml": "base: math_cpu\neval: {tasks: 32}\n",
}
"""What the reader of any page is taken to have: rows, a module and a recipe of his own."""
LASTING_S = 900
IN_FULL = ("tutorial.md",)
"""Pages whose runs are run to their end."""


def pages_with(*languages: str) -> list[Path]:
    return [page for page in PAGES if any(block.language in languages for block in blocks(page))]


def name(value: object) -> str:
    return value.name if isinstance(value, Path) else value if isinstance(value, str) else ""


def written(page: Path, folder: Path) -> None:
    """The files that a reader has, and those of the page."""
    files = {block.file: block.text for block in blocks(page) if block.file}
    for path, text in (GIVEN | files).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_table: None) -> Path:
    """A user's folder, in which commands are planned. What they register is gone afterwards."""

    def prepare(config: Config, *, make: bool, begin: object) -> Prepared:
        validate(config)
        return Prepared(None, 0)

    monkeypatch.setattr(preflight, "prepare", prepare)  # in this process: a child would import torch each time
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(registry._registered, "loss", dict(registry.registered("loss")))
    monkeypatch.setitem(registry._registered, "advantage", dict(registry.registered("advantage")))
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_block_is_overlooked(page: Path) -> None:
    fences = re.findall(r"^ *```(\w+)$", page.read_text(), re.MULTILINE)
    assert [block.language for block in blocks(page)] == fences


@pytest.mark.parametrize("page", pages_with("python", "yaml"), ids=name)
def test_what_is_to_be_written_can_be_read(page: Path, here: Path) -> None:
    written(page, here)
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.program, f"{page.name}:{block.line}")
        elif block.language == "yaml" and not block.is_part:
            (here / "example.yaml").write_text(block.text)
            validate_env(load_config(here / "example.yaml"), dry=True)


def planned(command: str) -> list[str]:
    """The arguments of `fresco run`, for a command that is one in another form too."""
    words = shlex.split(command.split("&& ")[-1])
    if words[0] == "bash" and words[1].startswith("launch/"):
        return ["run", Path(words[1]).stem, *words[2:]]
    return words[1:] if words[:2] == ["fresco", "run"] else []


RUNS = [
    (page, command, block.needs)
    for page in pages_with("bash")
    if page.name not in IN_FULL
    for block in blocks(page)
    for command in block.commands
    if planned(command) and "openenv" not in command and "--help-fields" not in command
]


@pytest.mark.parametrize(("page", "command", "needs"), RUNS, ids=name)
def test_a_run_is_planned(page: Path, command: str, needs: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(page, here)
    if any(Path(block.file).parent.name == "algos" for block in blocks(page)) and "algo.loss" in command:
        command = command.replace("algo.loss=", "algo.loss=algos/").replace("soft_clip ", "soft_clip.py:soft_clip ", 1)
    assert main([*planned(command), "--dry-run"]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert "the configuration is valid" in printed
    is_started = not needs and "--dry-run" not in command
    assert not is_started or "(cuda:" not in printed, f"{page.name}: say `<!-- needs: gpu -->` above {command}"


def test_a_run_on_an_openenv_server_is_planned(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "environments.md"
    written(page, here)
    (command,) = [each for block in blocks(page) for each in block.commands if "env.name=openenv" in each]

    async def plan() -> int:
        async with counting(sessions=4) as (_, overrides):
            (url,) = [each for each in overrides if each.startswith("env.options.url=")]
            words = [url if each.startswith("env.options.url=") else each for each in shlex.split(command)[1:]]
            return await asyncio.to_thread(main, [*words, "--dry-run"])

    assert asyncio.run(plan()) == 0, capsys.readouterr().err


CHECKS = [
    (page, command)
    for page in pages_with("bash")
    for block in blocks(page)
    for command in block.commands
    if command.startswith("fresco env check") and page.name not in IN_FULL
]


@pytest.mark.parametrize(("page", "command"), CHECKS, ids=name)
def test_a_check_knows_its_environment(page: Path, command: str, here: Path) -> None:
    written(page, here)
    arguments = parse(shlex.split(command)[1:])
    assert arguments.call == "launch.commands.check_env:check"
    validate_options(load_config(None, [*arguments.overrides, f"env.name={arguments.name}"]))


SETUP = """
export PATH="{bin}:$PATH" PYTHONPATH="{root}"
cd "{root}"
"""
"""In the place of the copy's `launch/setup.sh`: what it installs is there."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the repository, as a fresh clone is one."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for path in filter(None, listed.split("\0")):
        target = tmp_path / "fresco" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)
    root = tmp_path / "fresco"
    (root / "launch" / "setup.sh").write_text(SETUP.format(bin=Path(sys.executable).parent, root=root))
    return root


def shortened(command: str) -> str:
    if not planned(command) or "--help-fields" in command:
        return command
    # No other test starts from the models of these, which take minutes to make.
    own = any(recipe in command for recipe in ("mixture_cpu", "agent_openai_cpu"))
    few = "model.warm_start.demonstrations=500 model.warm_start.steps=50" if own else ""
    return f"{command} steps=2 eval.tasks=8 {few}"


def bring_runs(block: Block, folder: Path) -> None:
    """The finished runs that a block speaks of, without making them: one that is quickly made."""
    wanted = set(re.findall(r"\b(?:runs/)([\w-]+)", " ".join(block.commands)))
    for each in sorted(wanted):
        if not (folder / "runs" / each).exists():
            made = ["experiments/simulated.yaml", f"name={each}", "steps=6", "tracking.replay=full"]
            if any(command.startswith(("fresco eval", "fresco replay")) for command in block.commands):
                # Its checkpoints play tasks and its steps are trained again, which a simulated one's cannot be.
                made = [each, "steps=2", "eval.tasks=8"]

            command = [sys.executable, "-m", "launch.cli", "run", *made]
            subprocess.run(command, cwd=folder, check=True, timeout=LASTING_S)


@pytest.mark.docs
@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("python", "bash"), ids=name)
@pytest.mark.timeout(2 * LASTING_S)  # a page has many commands, each with that limit of its own
def test_a_page_does_what_it_says(page: Path, copy: Path, tmp_path: Path) -> None:
    """Each block that needs nothing more, in the order of the page; the tutorial's in a folder outside of the copy."""
    folder = tmp_path / "outside" if page.name in IN_FULL else copy
    folder.mkdir(exist_ok=True)
    for path, text in {} if page.name in IN_FULL else GIVEN.items():
        (folder / path).write_text(text)

    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": os.pathsep.join([str(copy), str(folder)])}
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)
        if block.needs or block.is_part or block.language not in ("python", "bash"):
            continue

        script = "\n".join(block.commands if page.name in IN_FULL else map(shortened, block.commands))
        if block.language == "bash" and page.name not in IN_FULL:
            bring_runs(block, folder)
        command = ["bash", "-euo", "pipefail", "-c", script]
        if block.language == "python":
            command = [sys.executable, "-c", block.text]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LASTING_S)
        assert ended.returncode == 0, (
            f"{where}:\n{script or block.text}\n{ended.stdout[-2000:]}\n{ended.stderr[-3000:]}"
        )
