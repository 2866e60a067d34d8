"""Everything that can be wrong before a process starts, each as one clear line (ConfigError)."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from envs.registry import validate_env, validate_options
from launch.plan import ProcessSpec, gpus_needed, make_plan
from launch.prepare import Prepared, prepare
from rl.core.checkpoint_folder import CheckpointError, Meta, read_meta
from rl.core.config import Config, ConfigError
from rl.core.run import RunFile
from rl.core.sockets import make_curve_keys
from rl.weights.shm_file import check_space, sweep_stale

_IPC_PATH_LIMIT = 107  # bytes of a Unix socket path


@dataclass(frozen=True)
class Preflight:
    """A configuration that can run here, and what was found out on the way."""

    config: Config
    device: str
    plan: list[ProcessSpec]
    prepared: Prepared
    train_tasks: int
    eval_tasks: int
    unchecked: list[str]
    """What a dry run could not check, a line each."""


def visible_gpus() -> int:
    """GPUs that the driver lists; 0 without a driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


def check(config: Config, *, dry: bool) -> Preflight:
    """Everything that does not need the run's processes. Raises ConfigError; a dry run fetches and makes nothing."""
    unchecked: list[str] = []
    _check_ports(config)
    device = _check_device(config, dry, unchecked)

    path = config.model.path
    resolve_model = not dry or (path != "tiny" and Path(path).exists())
    if not resolve_model:
        unchecked.append(f"model.path={path!r} is not resolved in a dry run")
    prepared = prepare(config, resolve_model=resolve_model)
    train_tasks, eval_tasks = _count_tasks(config, dry, unchecked)

    sweep_stale()
    if config.weights.transport == "shm" and prepared.weight_bytes:
        check_space(prepared.weight_bytes, config.weights.slots)
    return Preflight(config, device, make_plan(config, device), prepared, train_tasks, eval_tasks, unchecked)


def _check_device(config: Config, dry: bool, unchecked: list[str]) -> str:
    """`cpu` or `cuda`; on the latter the plan's GPUs must be there."""
    gpus = visible_gpus()
    device = config.device if config.device != "auto" else "cuda" if gpus else "cpu"
    if device == "cuda" and gpus < gpus_needed(config):
        shortage = f"the plan needs {gpus_needed(config)} GPUs, this machine shows {gpus}"
        if not dry:
            raise ConfigError(f"device=cuda: {shortage}; lower generator.count or learner.ranks, or set device=cpu")
        unchecked.append(shortage)
    return device


def _count_tasks(config: Config, dry: bool, unchecked: list[str]) -> tuple[int, int]:
    validate_options(config)
    source = str(config.env.options.get("source", ""))
    on_hub = "/" in source and not source.startswith(("/", ".")) and not Path(source).exists()
    if dry and on_hub:
        unchecked.append(f"env.options.source={source!r} is not read in a dry run")
        return 0, 0

    train_tasks, eval_tasks = validate_env(config, dry)
    groups = config.rollout.groups_per_batch
    if train_tasks < groups:
        raise ConfigError(
            f"rollout.groups_per_batch={groups}: env {config.env.name!r} has only {train_tasks} training tasks"
        )
    return train_tasks, eval_tasks


def _check_ports(config: Config) -> None:
    if config.network.transport != "tcp":
        return

    first = config.network.base_port
    ports = sorted(int(endpoint.rpartition(":")[2]) for endpoint in _draft(config).endpoints().values())
    count = len(ports)
    if ports[-1] > 65535:
        needed = f"{count} ports are needed and the last would be {ports[-1]}"
        raise ConfigError(f"network.base_port={first}: {needed}; at most {65536 - count}")

    for port in ports:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.network.host, port))
            except OSError as error:
                raise ConfigError(
                    f"network.base_port={first}: port {port} on {config.network.host} cannot be used "
                    f"({error.strerror}); choose another base_port ({count} ports are needed, best below 32768, where "
                    "the kernel's ports for outgoing connections begin)"
                ) from None


def make_run(checked: Preflight, started: float) -> RunFile:
    """The run's folder and run.json. An earlier folder of the same name is kept beside it, numbered."""
    config = checked.config
    folder = (config.runs / config.name).absolute()
    meta = _resume_from(config)
    if folder.exists():
        config = _set_aside(folder, config)
    folder.mkdir(parents=True)
    (folder / "pid").write_text(str(os.getpid()))

    run = RunFile(
        config=config,
        run_id=uuid.uuid4().hex[:8],
        folder=folder,
        socket_folder=_socket_folder(folder),
        device=checked.device,
        epoch=meta.epoch + 1 if meta else 0,
        start_step=meta.step if meta else 0,
        model_folder=checked.prepared.folder,
        train_tasks=checked.train_tasks,
        eval_tasks=min(checked.eval_tasks or config.eval.tasks, config.eval.tasks),
        started_at=started,
    )

    if config.network.transport == "tcp":
        make_curve_keys(folder)
    run.save()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    return run


def _refuse_live(folder: Path) -> None:
    try:
        pid = int((folder / "pid").read_text())
        os.kill(pid, 0)
    except (OSError, ValueError):
        return
    if b"fresco" in Path(f"/proc/{pid}/cmdline").read_bytes():
        raise ConfigError(f"name={folder.name!r}: a run of this name is going on (process {pid}); choose another name")


def _socket_folder(folder: Path) -> Path:
    """Sockets and temporary files of the run's processes, removed at its end.

    In the run's folder, or a short temporary one where the path would not fit into a socket address
    (the longest name is an engine's own: a UUID).
    """
    inside = folder / "ipc"
    if len(str(inside)) + 1 + len(str(uuid.uuid4())) <= _IPC_PATH_LIMIT:
        inside.mkdir()
        return inside
    return Path(tempfile.mkdtemp(prefix="fresco-"))


def _resume_from(config: Config) -> Meta | None:
    if config.resume is None:
        return None
    try:
        return read_meta(config.resume)
    except CheckpointError as error:
        raise ConfigError(f"resume={str(config.resume)!r}: {error}") from None


def _set_aside(folder: Path, config: Config) -> Config:
    """Keep an earlier folder of the same name, numbered; a checkpoint to resume from may move with it."""
    _refuse_live(folder)
    numbered = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    moved = next(path for path in numbered if not path.exists())
    folder.rename(moved)

    if config.resume is not None and config.resume.absolute().is_relative_to(folder):
        return config.model_copy(update={"resume": moved / config.resume.absolute().relative_to(folder)})
    return config


def _draft(config: Config) -> RunFile:
    """A run that is not made, for its endpoints."""
    folder = (config.runs / config.name).absolute()
    unknown: dict[str, Any] = {"run_id": "", "device": "", "train_tasks": 0, "eval_tasks": 0, "started_at": 0.0}
    return RunFile(config=config, folder=folder, socket_folder=folder / "ipc", **unknown)


def print_plan(checked: Preflight) -> None:
    """What `--dry-run` shows: processes, devices, pinning, endpoints, and what could not be checked here."""
    console = Console(highlight=False)
    processes = Table("process", "module", "device", "cores", title=f"{len(checked.plan)} processes")
    for spec in checked.plan:
        where = f"cuda:{','.join(map(str, spec.gpus))}" if spec.gpus else "cpu"
        cores = f"{spec.cores[0]}-{spec.cores[-1]}" if spec.cores else "shared"
        processes.add_row(spec.name, spec.module, where, cores)
    console.print(processes)

    environments: dict[str, dict[str, str]] = {}
    for spec in checked.plan:
        environments.setdefault(spec.role, spec.environment)
    for role, values in environments.items():
        if variables := [f"{key}={value}" for key, value in values.items() if key != "CUDA_VISIBLE_DEVICES"]:
            console.print(f"environment of each {role}: {' '.join(variables)}", markup=False, soft_wrap=True)

    sockets = Table("socket", "endpoint", title="endpoints")
    for name, endpoint in _draft(checked.config).endpoints().items():
        sockets.add_row(name, endpoint)
    console.print(sockets)

    for line in checked.unchecked:
        console.print(f"not checked here: {line}", markup=False)
    console.print("dry run: the configuration is valid; nothing was started")
