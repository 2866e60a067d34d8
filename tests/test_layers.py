"""Layers: an import never points upwards, and broker, proxy and environment servers never import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("rl", "rollout", "envs", "algos", "launch", "experiments")
TORCH_SIDE = {
    "rl.policy", "rl.logprob", "rl.packing", "rl.update", "rl.optimizer", "rl.learner", "rl.checkpoint",
    "rl.publish", "rl.tiny", "rl.sft", "rl.sampling", "rl.algorithm", "rl.credit", "rl.critic", "rl.trainer",
    "rl.warm_start",
}  # fmt: skip


def layer(module: str) -> int:
    """Height of a module; an import may only point to the same height or lower."""
    if module in ("envs.base", "envs") or module.split(".")[0] == "algos":
        return 0
    if module.split(".")[0] == "rl" and module not in TORCH_SIDE:
        return 1
    if module in TORCH_SIDE:
        return 4
    return {"rollout": 2, "envs": 3, "launch": 5, "experiments": 5}[module.split(".")[0]]


def project_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            for alias in node.names:
                candidate = f"{node.module}.{alias.name}"
                if (ROOT / (candidate.replace(".", "/") + ".py")).exists():
                    found.add(candidate)
    return {name for name in found if name.split(".")[0] in PACKAGES}


def all_modules() -> dict[str, Path]:
    modules = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            modules[name] = path
    return modules


def test_imports_never_point_upwards() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, path in all_modules().items()
        for target in project_imports(path)
        if layer(target) > layer(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    graph = {module: project_imports(path) & all_modules().keys() for module, path in all_modules().items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for target in graph[module] - {module}:
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize(
    "module", ["rollout.broker.process", "rollout.proxy.process", "envs.server", "rl.simulated_learner", "launch.cli",
               "launch.supervisor", "launch.preflight", "rollout.generator", "rollout.engines.simulated"],
)  # fmt: skip
def test_torch_is_not_imported(module: str) -> None:
    heavy = "' '.join({'torch', 'transformers', 'vllm'} & sys.modules.keys())"
    code = f"import sys, {module}; sys.exit({heavy} or 0)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, f"{module} imports {ended.stderr}"


def test_files_stay_short() -> None:
    long = {str(path): n for path in all_modules().values() if (n := len(path.read_text().splitlines())) > 450}
    assert not long
