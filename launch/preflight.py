"""Everything that can be wrong before a process starts, each as one clear line (ConfigError)."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml
from filelock import FileLock, Timeout
from huggingface_hub import try_to_load_from_cache
from rich.console import Console
from rich.table import Table

from envs.registry import validate_env, validate_options
from launch.fork_server import ForkServer
from launch.gpus import Gpu, visible_gpus
from launch.memory import Need, check_context, check_memory, estimate, read_shape
from launch.plan import ProcessSpec, gpus_needed, make_plan
from launch.prepare import Prepared, check_family_of, prepare
from rl.config.schema import Config, ConfigError
from rl.store.checkpoint_folder import CheckpointError, Meta, read_journal, read_meta, verify
from rl.weights.shm_file import check_space, sweep_stale
from rl.wire.columns import register_configured
from rl.wire.run import RunFile
from rl.wire.sockets import make_curve_key
from rollout.broker.core import BrokerCore
from rollout.broker.policy import make_priority, make_task_source
from rollout.broker.rules import Rules
from rollout.parsers.names import check_names

_IPC_PATH_LIMIT = 107  # bytes of a Unix socket path
_locks: dict[Path, FileLock] = {}
"""By folder: of the runs that this process made. The kernel lets go of them when it ends, however it ends."""


@dataclass(frozen=True)
class Preflight:
    """A configuration that can run here, and what was found out on the way."""

    config: Config
    device: str
    plan: list[ProcessSpec]
    prepared: Prepared
    memory: list[Need]
    train_tasks: int
    eval_tasks: int
    unchecked: list[str]
    """What a dry run could not check, a line each."""


def check(config: Config, *, dry: bool, forks: ForkServer | None = None) -> Preflight:
    """Everything that does not need the run's processes. Raises ConfigError; a dry run fetches and makes nothing.

    forks: prepares the model, if there is one.
    """
    unchecked: list[str] = []
    _check_ports(config)
    _check_folders(config, dry)
    _check_plugins(config)
    _check_parser(config, dry, unchecked)
    gpus = visible_gpus()
    device = _check_device(config, gpus, dry, unchecked)

    prepared = _prepare(config, dry, forks, unchecked)
    memory = _check_memory(config, device, prepared.folder, gpus, unchecked)
    train_tasks, eval_tasks = _count_tasks(config, dry, unchecked)

    if not config.network.curve:
        print("! network.curve=false: any process that reaches a socket of this run can speak in it", file=sys.stderr)
    sweep_stale()
    if config.weights.transport == "shm" and prepared.weight_bytes:
        check_space(prepared.weight_bytes, config.weights.slots)
    plan = make_plan(config, device, gpus)
    return Preflight(config, device, plan, prepared, memory, train_tasks, eval_tasks, unchecked)


def _installed() -> bool:
    """Whether this is the complete installation, and not the small one of a dry run before it."""
    return find_spec("torch") is not None


def _prepare(config: Config, dry: bool, forks: ForkServer | None, unchecked: list[str]) -> Prepared:
    """A dry run needs no package of the learner or the engine: it may come before gigabytes are installed."""
    path = config.model.path
    told = None if path == "tiny" else Path(path) if Path(path).exists() else _known_to_the_hub(path)
    if told is not None:
        check_family_of(config, told)
    if dry and not _installed():
        unchecked.append("algo and model: torch is not installed yet")
        return Prepared(None, 0)
    resolve_model = not dry or (path != "tiny" and Path(path).exists())
    if not resolve_model:
        unchecked.append(f"model.path={path!r} is not resolved in a dry run")
    return prepare(config, resolve_model=resolve_model, forks=forks)


def _check_device(config: Config, gpus: list[Gpu], dry: bool, unchecked: list[str]) -> str:
    """`cpu` or `cuda`; on the latter the plan's GPUs must be there."""
    device = config.device if config.device != "auto" else "cuda" if gpus else "cpu"
    alone = device == "cpu" and config.generator.tensor_parallel == 1
    if config.generator.own_process is False and not alone:
        raise ConfigError(
            "generator.own_process=false: only for device=cpu with generator.tensor_parallel=1; leave it out"
        )
    if device == "cuda" and len(gpus) < gpus_needed(config):
        shortage = f"the plan needs {gpus_needed(config)} GPUs, this machine shows {len(gpus)}"
        if not dry:
            raise ConfigError(f"device=cuda: {shortage}; lower generator.count or learner.ranks, or set device=cpu")
        unchecked.append(shortage)
    return device


def _check_folders(config: Config, dry: bool) -> None:
    """The runs' folder can be written, and what is resumed from is a checkpoint."""
    try:
        if not dry:
            config.runs.mkdir(parents=True, exist_ok=True)
        existing = next(folder for folder in (config.runs, *config.runs.absolute().parents) if folder.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(f"runs={str(config.runs)!r}: cannot be written ({error.strerror}); choose another") from None

    folder = config.runs / config.name
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"name={config.name!r}: {str(folder)!r} is no folder of a run; choose another name")
    if config.resume is not None and not (config.resume / "meta.json").exists():
        _resume_from(config, read_meta)  # says what is missing; the files themselves are read once, by `make_run`


def _check_plugins(config: Config) -> None:
    """Those that the broker makes, and keeps in its log; environment and algorithm are checked with their options."""
    rules = Rules.of(config, train_tasks=1)
    made = {"priority": make_priority(rules), "curriculum": make_task_source(rules)}
    for name, plugin in made.items():
        try:
            pickle.dumps(plugin)
        except Exception as error:
            kept = f"the broker's log cannot keep its state ({error}); hold no lambdas, locks and open files in it"
            raise ConfigError(f"rollout.{name}={getattr(rules, name)!r}: {kept}") from None
    register_configured(config.algo.columns)


def _check_parser(config: Config, dry: bool, unchecked: list[str]) -> None:
    """The names of vLLM's parsers. Whether they fit the model is known when they have been imported."""
    try:
        check_names(config.chat)
    except ModuleNotFoundError:
        if not dry:
            raise ConfigError(f"chat.parser={config.chat.parser!r}: vLLM is not installed; install it") from None
        unchecked.append(f"chat.parser={config.chat.parser!r}: vLLM is not installed yet")


def _check_memory(
    config: Config, device: str, folder: Path | None, gpus: list[Gpu], unchecked: list[str]
) -> list[Need]:
    _check_threads(config, device)
    folder = folder or _known_to_the_hub(config.model.path)
    model = read_shape(folder) if folder else None
    if model:
        check_context(config, model)
    elif config.generator.engine == "vllm":
        how = f"hf download {config.model.path} config.json" if "/" in config.model.path else "a run makes it"
        unchecked.append(f"memory is estimated without the model, whose config.json is not here ({how})")

    needs = estimate(config, device, model)
    smallest = min((gpu.memory for gpu in gpus if gpu.memory is not None), default=None)
    check_memory(needs, psutil.virtual_memory().total, smallest)
    return needs


def _check_threads(config: Config, device: str) -> None:
    cores = len(os.sched_getaffinity(0))
    for field, threads in (("generator", config.generator.threads), ("learner", config.learner.threads)):
        if device == "cpu" and threads > cores:
            raise ConfigError(f"{field}.threads={threads}: this machine gives us {cores} cores; at most that many")


def _known_to_the_hub(name: str) -> Path | None:
    """The folder of a hub model whose `config.json` was fetched before."""
    if name.count("/") != 1 or Path(name).exists():
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # the hub can have no such name
        raise ConfigError(f"model.path={name!r}: no such folder, and no hub name (owner/name)") from None
    return Path(found).parent if isinstance(found, str) else None


def _count_tasks(config: Config, dry: bool, unchecked: list[str]) -> tuple[int, int]:
    try:
        validate_options(config)
    except ConfigError as error:
        if not (dry and not _installed() and isinstance(error.__cause__, ModuleNotFoundError)):
            raise
        unchecked.append(f"env.name={config.env.name!r}: {error.__cause__.name} is not installed yet")
        return 0, 0

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
    try:
        socket.getaddrinfo(config.network.host, None)
    except OSError as error:
        raise ConfigError(
            f"network.host={config.network.host!r}: no address of this machine ({error.strerror})"
        ) from None
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
    """The run's folder and run.json. An earlier folder of the same name is kept beside it, numbered.

    Raises ConfigError if it is that of a run that is going on.
    """
    config = checked.config
    folder = (config.runs / config.name).absolute()
    with _only_start(folder):
        meta = _resume_from(config, verify)
        if meta is not None:
            _check_journal(config, checked.train_tasks, meta)
        if folder.exists():
            config = _set_aside(folder, config)
        folder.mkdir(parents=True)
        _locks[folder] = _lock(folder / "lock", config.name)

    run = RunFile(
        config=config,
        run_id=uuid.uuid4().hex[:8],
        folder=folder,
        socket_folder=_socket_folder(folder),
        device=checked.device,
        timeline=meta.timeline + 1 if meta else 0,
        start_step=meta.step if meta else 0,
        model_folder=checked.prepared.folder,
        train_tasks=checked.train_tasks,
        eval_tasks=min(checked.eval_tasks or config.eval.tasks, config.eval.tasks),
        started_at=started,
    )

    make_curve_key(folder)
    run.save()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    return run


@contextlib.contextmanager
def _only_start(folder: Path) -> Iterator[None]:
    """Of starts of one name at once the first goes on; the others end as if its run had begun.

    The lock in the run's folder cannot decide between them: it comes after the folder, and moves with an earlier one.
    """
    path = folder.with_name(f".{folder.name}.starting")
    lock = _lock(path, folder.name)
    try:
        yield
    finally:
        # Before its release: whoever had opened it gets no lock of a file that has no name any more.
        path.unlink(missing_ok=True)
        lock.release()


def _lock(path: Path, name: str) -> FileLock:
    """Of a run of this name that is going on. Raises ConfigError when another process has it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(f"name={name!r}: a run of this name is going on; choose another name") from None
    return lock


def _socket_folder(folder: Path) -> Path:
    """Sockets and temporary files of the run's processes, removed at its end.

    In the run's folder, or a short temporary one where the path would not fit into a socket address
    (the longest name is an engine's own: a UUID).
    """
    inside = folder / "ipc"
    if len(str(inside)) + 1 + len(str(uuid.uuid4())) <= _IPC_PATH_LIMIT:
        inside.mkdir(mode=0o700)
        return inside
    return Path(tempfile.mkdtemp(prefix="fresco-"))


def _resume_from(config: Config, read: Callable[[Path], Meta]) -> Meta | None:
    if config.resume is None:
        return None
    try:
        return read(config.resume)
    except CheckpointError as error:
        raise ConfigError(f"resume={str(config.resume)!r}: {error}") from None


def _check_journal(config: Config, train_tasks: int, meta: Meta) -> None:
    """The broker can go on from the journal with this configuration. Raises ConfigError."""
    assert config.resume is not None
    try:
        state = msgspec.msgpack.decode(read_journal(config.resume))
        BrokerCore(Rules.of(config, train_tasks, meta.step)).restore(state)
    except (CheckpointError, ValueError, LookupError, msgspec.MsgspecError) as error:
        raise ConfigError(f"resume={str(config.resume)!r}: {error}") from None


def _set_aside(folder: Path, config: Config) -> Config:
    """Keep an earlier folder of the same name, numbered; a checkpoint to resume from may move with it."""
    if folder in _locks:
        _locks.pop(folder).release()
    lock = _lock(folder / "lock", folder.name)
    numbered = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    moved = next(path for path in numbered if not path.exists())
    folder.rename(moved)
    lock.release()
    print(f"the earlier run of this name is kept as {moved}", flush=True)

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
        where = f"cuda:{','.join(spec.gpus)}" if spec.gpus else "cpu"
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

    for need in checked.memory:
        console.print(f"memory ({need.where}): {need}", markup=False, soft_wrap=True)
    for line in checked.unchecked:
        console.print(f"not checked here: {line}", markup=False)
    console.print("dry run: the configuration is valid; nothing was started")
