"""Floors: imports between folders only go down, and broker, proxy and environment servers never import torch.

The floors are derived from the folders themselves: a folder stands above every folder that its modules import. That
has an answer exactly when no imports between folders form a circle, so no list of modules has to be kept.
"""

from __future__ import annotations

import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from experiments.structure.checkout import FLOORS, Graph, folder_graph, import_graph, modules_of
from experiments.structure.figures import LONGEST_FILE, LONGEST_FUNCTION, arrows, length, upward

ROOT = Path(__file__).parent.parent
MODULES = modules_of(ROOT, *FLOORS)
MAX_ARROWS = 13
FRESHNESS = ("rules", "tickets", "groups", "batches")


def no_circle(graph: Graph) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports form a circle: " + " <- ".join(error.args[1]))


def test_top_level_folders_import_downwards_only() -> None:
    graph = folder_graph(MODULES, depth=1)

    assert set(graph) == set(FLOORS)
    assert not upward(graph)
    assert arrows(graph) <= MAX_ARROWS


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_nested_folders_have_floors(depth: int) -> None:
    no_circle(folder_graph(MODULES, depth))


def test_modules_import_in_no_circle() -> None:
    no_circle(import_graph(MODULES))


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
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, f"{module} imports {ended.stderr}"


def test_freshness_alone_is_read_in_less_than_400_lines_without_any_hook() -> None:
    """Rules F1 to F5, in the files that docs/freshness.md names."""
    files = [module for module in MODULES if module.name in [f"rollout.broker.{name}" for name in FRESHNESS]]
    assert len(files) == len(FRESHNESS) and sum(len(module.lines) for module in files) < 400

    imported = set().union(*(import_graph(MODULES)[module.name] for module in files))
    assert not [name for name in imported if "hook" in name]


def test_files_stay_short() -> None:
    assert not {str(module.path): n for module in MODULES if (n := len(module.lines)) > LONGEST_FILE}


def test_functions_stay_short() -> None:
    long = [
        f"{module.path}:{function.lineno} {function.name}"
        for module in MODULES
        for function in module.functions
        if length(function) > LONGEST_FUNCTION
    ]
    assert not long


def test_nothing_is_pickled() -> None:
    """Neither by that module, whose restricted reader alone is used, nor by torch's exchange of objects of ranks, nor
    by the pipes and queues of multiprocessing: what they carry are bytes."""
    calls = re.compile(r"\bpickle\.(dump|load)s?\(|(broadcast|gather|scatter|send|recv)_object(_list)?\(")
    assert not [f"{m.path}:{n}" for m in MODULES for n, line in enumerate(m.lines, 1) if calls.search(line)]

    pipes = re.compile(r"\.(send|recv)\(|Queue\(|Manager\(")
    parents = [m for m in MODULES if any("multiprocessing" in line and "import" in line for line in m.lines)]
    assert "rl.replay.ranks" in [m.name for m in parents]
    assert not [f"{m.path}:{n}" for m in parents for n, line in enumerate(m.lines, 1) if pipes.search(line)]
