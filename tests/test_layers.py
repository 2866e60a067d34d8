"""Floors: imports between folders only go down, and broker, proxy and environment servers never import torch.

The floors are derived from the folders themselves. A folder stands above every folder that its modules import; that
has an answer exactly when the folders of each storey form no cycle, so no list of modules has to be kept.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("algos", "rl", "rollout", "envs", "launch", "experiments")
"""From the ground up: what stands later may import what stands earlier."""
MAX_ARROWS = 13


def all_modules() -> dict[str, Path]:
    modules = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            modules[name] = path
    return modules


MODULES = all_modules()


def project_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                candidate = f"{node.module}.{alias.name}"
                found.add(candidate if candidate in MODULES else node.module)
    return found & MODULES.keys()


def imports() -> dict[str, set[str]]:
    return {module: project_imports(path) - {module} for module, path in MODULES.items()}


def folder_of(module: str, depth: int) -> str:
    """The folder that holds a module, at most `depth` names long."""
    parts = module.split(".") if MODULES[module].name == "__init__.py" else module.split(".")[:-1]
    return ".".join(parts[:depth])


def folder_graph(depth: int) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for module, targets in imports().items():
        folder = folder_of(module, depth)
        graph.setdefault(folder, set()).update(folder_of(target, depth) for target in targets)
        graph[folder].discard(folder)
    return graph


def no_cycle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports form a circle: " + " <- ".join(error.args[1]))


def test_top_level_folders_import_downwards_only() -> None:
    graph = folder_graph(1)
    upwards = [
        f"{package} imports {target}"
        for package, targets in graph.items()
        for target in targets
        if PACKAGES.index(target) >= PACKAGES.index(package)
    ]
    assert not upwards, "\n".join(upwards)
    assert sum(len(targets) for targets in graph.values()) <= MAX_ARROWS


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_nested_folders_have_floors(depth: int) -> None:
    no_cycle(folder_graph(depth))


def test_no_import_cycles() -> None:
    no_cycle(imports())


@pytest.mark.parametrize(
    "module",
    [
        "rollout.broker.process",
        "rollout.proxy.process",
        "envs.server",
        "rl.learner.simulated",
        "launch.cli",
        "launch.supervisor",
        "launch.preflight",
        "rollout.generator.process",
        "rollout.generator.engines.simulated",
    ],
)
def test_torch_is_not_imported(module: str) -> None:
    heavy = "' '.join({'torch', 'transformers', 'vllm'} & sys.modules.keys())"
    code = f"import sys, {module}; sys.exit({heavy} or 0)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, f"{module} imports {ended.stderr}"


def test_files_stay_short() -> None:
    long = {str(path): n for path in MODULES.values() if (n := len(path.read_text().splitlines())) > 450}
    assert not long
