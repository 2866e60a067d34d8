"""Bytes on a host are the matter of `rl/weights/host` alone: what everybody else sees of weights is tensors."""

from __future__ import annotations

import ast
from pathlib import Path

from experiments.structure.checkout import FLOORS, Module, modules_of

ROOT = Path(__file__).parents[3]
HOST = "rl.weights.host"
OUTSIDE = [each for each in modules_of(ROOT, *FLOORS) if not each.name.startswith("rl.weights")]
THEIRS = {"Manifest", "TensorSpec", "Segment", "Segments", "SlotTable", "SlotsFile", "HostSender", "HostReceiver"}
THEIRS |= {"combined_checksum", "draft_of"}


def words(module: Module) -> set[str]:
    """All names in it, of imports and attributes as well."""
    found = {node.id for node in module.nodes if isinstance(node, ast.Name)}
    found |= {node.attr for node in module.nodes if isinstance(node, ast.Attribute)}
    return found | {alias.name for node in module.nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def imports(module: Module) -> set[str]:
    found = {node.module or "" for node in module.nodes if isinstance(node, ast.ImportFrom)}
    return found | {alias.name for node in module.nodes if isinstance(node, ast.Import) for alias in node.names}


def test_nobody_outside_speaks_of_slots_and_manifests() -> None:
    assert not {module.name: found for module in OUTSIDE if (found := words(module) & THEIRS)}
    moving = [each for each in OUTSIDE if each.name.startswith(("rl.learner", "rl.models", "rollout.generator"))]
    assert len(moving) > 30 and not [each.name for each in moving if "memoryview" in words(each)]


def test_nobody_outside_imports_from_there_but_who_makes_room_and_cleans_up() -> None:
    inside = {each.name: found for each in OUTSIDE if (found := {i for i in imports(each) if i.startswith(HOST)})}
    assert {name for name in inside if not name.startswith("experiments")} == {
        "launch.agent",
        "launch.preflight",
        "launch.supervisor",
    }
    assert set().union(*inside.values()) == {HOST}


def test_an_engine_imports_nothing_of_the_learner() -> None:
    engines = [each for each in OUTSIDE if each.name.startswith("rollout.generator")]
    assert engines and not [each.name for each in engines if any(i.startswith("rl.learner") for i in imports(each))]


def test_updater_and_proof_know_no_channel() -> None:
    serving = modules_of(ROOT, *(f"rl/weights/{name}.py" for name in ("channel", "updater", "service")))
    assert len(serving) == 3 and not [each.name for each in serving if any(i.startswith(HOST) for i in imports(each))]
