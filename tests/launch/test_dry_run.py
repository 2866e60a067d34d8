"""A dry run comes before gigabytes are installed: a small environment of its own is enough for every recipe."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LIST = ROOT / "requirements" / "dry_run.txt"
RECIPES = sorted(path.name for path in (ROOT / "experiments").glob("*.yaml"))

_PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then echo {version}; exit {code}; fi
echo "$0 $@" >> "$CALLS"
if [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
case "$*" in *"pip install -r"* | *"--no-deps -r"*) exit "${PIP_ENDS:-0}" ;; esac
"""
_SCRIPT = """#!/usr/bin/env bash
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
echo "$PATH"
"""


def named() -> list[str]:
    return [line for line in LIST.read_text().splitlines() if line[:1].isalpha()]


def with_dependencies(names: list[str]) -> set[str]:
    """Those of what is installed, as pip would follow them."""
    found: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name in found:
            continue

        found.add(name)
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the packages of the list and what they need, and nothing else."""
    folder = tmp_path_factory.mktemp("small")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--copies", str(folder)], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")

    for name in with_dependencies(named()):
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))))
    return folder / "bin" / "python"


@pytest.mark.docs
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_dry_run_without_torch(small: Path, recipe: str) -> None:
    command = [str(small), "-m", "launch.cli", "run", f"experiments/{recipe}", "--dry-run"]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)

    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    assert "dry run: the configuration is valid; nothing was started" in ended.stdout
    assert "torch is not installed yet" in ended.stdout or recipe == "simulated.yaml"


def test_a_wrong_configuration_is_refused_there_as_well(small: Path) -> None:
    command = [str(small), "-m", "launch.cli", "run", "math_cpu", "--dry-run", "env.name=mats"]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode != 0 and "did you mean 'math'" in ended.stderr


def test_the_list_has_the_versions_of_a_complete_installation() -> None:
    pinned = {
        canonicalize_name(line.partition("==")[0]) for line in (ROOT / "requirements/cpu.txt").open() if "==" in line
    }
    assert "-c cpu.txt" in LIST.read_text()
    assert with_dependencies(named()) <= pinned


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a fresh copy in `tmp_path`, with a Python that only writes down what it is asked."""
    for folder in ("launch", "requirements"):
        (tmp_path / folder).mkdir()
    for file in (
        "launch/setup.sh",
        "pyproject.toml",
        *(f"requirements/{name}.txt" for name in ("cpu", "gpu", "dry_run")),
    ):
        shutil.copy(ROOT / file, tmp_path / file)
    python = stand_in(tmp_path / "python3.11", "3.11")
    return {"PATH": os.environ["PATH"], "FRESCO_PYTHON": str(python), "CALLS": str(tmp_path / "calls")}


def stand_in(path: Path, version: str, code: int = 0) -> Path:
    """A Python that says this version, or fails, and otherwise only writes down what it is asked."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(_PYTHON.replace("{version}", version).replace("{code}", str(code)))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("pip_ends", "code"), [("0", 0), ("1", 1)])
def test_a_shell_that_one_types_in_goes_on_after_setup(
    tmp_path: Path, environment: dict[str, str], pip_ends: str, code: int
) -> None:
    """It would be closed otherwise by the first command that fails, with all that it has shown."""
    typed = f"source {tmp_path}/launch/setup.sh; echo setup $?; false; echo $unset still here"
    command = ["bash", "--norc", "-ic", typed]
    environment["PIP_ENDS"] = pip_ends
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert f"setup {code}\n" in ended.stdout and "still here" in ended.stdout, ended.stderr
    assert ("requirements/cpu.txt failed" in ended.stderr) == bool(code)

    script = subprocess.run(["bash", "-c", typed], env=environment, capture_output=True, text=True, timeout=240)
    assert script.returncode == 1 and "still here" not in script.stdout


def test_what_setup_installs(tmp_path: Path, environment: dict[str, str]) -> None:
    """A dry run installs the small list, unless all is there."""
    script = tmp_path / "launch" / "any.sh"
    script.write_text(_SCRIPT)
    calls = Path(environment["CALLS"])

    def start(*arguments: str) -> tuple[str, str]:
        """The first folder in which programs are looked for, and what Python was asked to do."""
        calls.write_text("")
        command = ["bash", str(script), *arguments]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
        return ended.stdout.partition(":")[0], calls.read_text()

    path, asked = start("learner.lr=1", "--dry-run")
    assert path == str(tmp_path / ".venv-dry-run/bin") and "requirements/dry_run.txt" in asked
    path, asked = start("--dry-run")
    assert path == str(tmp_path / ".venv-dry-run/bin") and not asked, "installed once"

    path, asked = start("learner.lr=1")
    assert path == str(tmp_path / ".venv/bin") and "requirements/cpu.txt" in asked
    path, asked = start("--dry-run")
    assert path == str(tmp_path / ".venv/bin") and not asked, "the complete environment serves as well"


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"python3.11": ("3.11", 0), "python3.12": ("3.12", 0)}, "python3.11"),
        ({"python3.12": ("3.12", 0), "python3": ("3.9", 0)}, "python3.12"),
        ({"python3.11": ("", 127), "python3.13": ("3.13", 0)}, "python3.13"),  # found, and does not run: pyenv's
        ({"python3": ("3.12", 0)}, "python3"),
        ({"python3": ("3.10", 0)}, "python3 is 3.10; "),
        ({"python3.11": ("", 127), "python3": ("3.14", 0)}, "python3 is 3.14; "),
        ({}, ""),
    ],
)
def test_the_python_that_setup_takes(
    tmp_path: Path, environment: dict[str, str], there: dict[str, tuple[str, int]], taken: str
) -> None:
    programs = tmp_path / "bin"
    for name, (version, code) in there.items():
        stand_in(programs / name, version, code)
    for name in ("bash", "cat", "cp", "cut", "dirname", "grep", "mkdir", "rm", "sed", "sha256sum", "touch"):
        (programs / name).parent.mkdir(exist_ok=True)
        (programs / name).symlink_to(str(shutil.which(name)))
    del environment["FRESCO_PYTHON"]
    environment["PATH"] = str(programs)

    command = ["bash", "-c", f"source {tmp_path}/launch/setup.sh"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    if taken in there:
        asked = Path(environment["CALLS"]).read_text()
        assert ended.returncode == 0 and asked.startswith(f"{programs / taken} -m venv .venv\n"), ended.stderr
        assert f".venv is of {taken}, Python {there[taken][0]}" in ended.stderr
    else:
        (line,) = ended.stderr.splitlines()
        assert ended.returncode == 1 and line.startswith(f"fresco: {taken}no Python 3.11, 3.12 or 3.13 among: ")


def test_a_python_that_one_names_is_taken_or_refused(tmp_path: Path, environment: dict[str, str]) -> None:
    stand_in(Path(environment["FRESCO_PYTHON"]), "3.10")
    command = ["bash", "-c", f"source {tmp_path}/launch/setup.sh"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 1 and f"{environment['FRESCO_PYTHON']} is 3.10; no Python 3.11" in line


@pytest.mark.parametrize("pins", ["cpu", "gpu"])
def test_setup_says_how_much_it_installs(tmp_path: Path, environment: dict[str, str], pins: str) -> None:
    environment["FRESCO_REQUIREMENTS"] = f"requirements/{pins}.txt"
    command = ["bash", "-c", f"source {tmp_path}/launch/setup.sh"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
    (line,) = [line for line in ended.stderr.splitlines() if "installing" in line]
    assert {"cpu": "3.5 GB on disk", "gpu": "4.2 GB to fetch, 10 GB on disk"}[pins] in line
