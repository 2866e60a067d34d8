"""Everything that can be wrong before a process starts, each as one clear line (ConfigError)."""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import yaml
from filelock import FileLock, Timeout

from envs.data import data_of
from envs.held_out import check_held_out, knows_tasks
from envs.lengths import check_lengths
from envs.registry import validate_env, validate_options
from launch.boards import check_boards
from launch.disk import Written, check_disk, written_by
from launch.launcher import check_launcher
from launch.launcher.local import Begin, begin_process
from launch.machine import Machine, this_machine
from launch.memory import Need, check_context, check_longest, check_memory, estimate, shape_of, shared_with_learner
from launch.model_config import model_config
from launch.plan import ProcessSpec, gpus_needed, has_own_teacher, make_plan, shares_gpus
from launch.prepare import Prepared, check_family_of, may_be_on_hub, prepare
from launch.refusing import Refusing
from launch.sittings import write_history
from rl.config.algo import is_endpoint
from rl.config.hooks import make_hooks
from rl.config.lora import lora_options
from rl.config.plugins import validated
from rl.config.schema import Config, ConfigError
from rl.learner.rows import check_journal
from rl.learner.simulated import OPTIONS as LEARNER_OPTIONS
from rl.models.families import read_config
from rl.models.shape import ModelShape
from rl.observe.alarms import check_alarms
from rl.store.checkpoint_folder import CheckpointError, Meta, read_journal, read_meta, verify
from rl.weights import DEVICE_CHANNELS
from rl.weights.host import make_room
from rl.wire.columns import register_configured, shape_by_model
from rl.wire.run import RunFile, numeric
from rl.wire.sockets import make_curve_key
from rollout.broker.actions import GroupRecord
from rollout.broker.core import BrokerCore
from rollout.broker.intake import Intake
from rollout.broker.kept import Kept, keep, restore
from rollout.broker.rules import Rules
from rollout.episodes.environment import EnvironmentFamily
from rollout.generator.engines import engine_options
from rollout.generator.engines.environment import check_vllm
from rollout.parsers.names import check_names
from rollout.proxy.core import ProxyCore

_DESCRIPTORS = 256  # of any process: modules, logs, pipes, event descriptors
_MOST_DESCRIPTORS = 1 << 16  # that a run takes where it may: agents of their own have pipes and connections
_IPC_PATH_LIMIT = 107  # bytes of a Unix socket path
_locks: dict[Path, FileLock] = {}
"""The locks, by folder, of the runs that this process made. The kernel lets go of them when it ends, however it
ends."""


@dataclass(frozen=True)
class Preflight:
    """A configuration that can run here, and what was found out on the way."""

    config: Config
    device: str
    plan: list[ProcessSpec]
    prepared: Prepared
    memory: list[Need]
    written: Written
    train_tasks: int
    eval_tasks: int
    data: dict[str, str]
    """What the training tasks are, by environment."""
    unchecked: list[str]
    """What a dry run could not check, a line each."""
    machine: Machine
    """For which it was checked."""


def check(config: Config, *, dry: bool, begin: Begin = begin_process, target: Machine | None = None) -> Preflight:
    """Everything that does not need the run's processes. Raises ConfigError; a dry run fetches and makes nothing.

    begin: how the child begins that prepares the model. target: the machine of a dry run, if it is not this one.
    """
    unchecked: list[str] = []
    _check_descriptors(_DESCRIPTORS)
    check_alarms(config.alarms)
    check_boards(config)
    _check_options(config)
    _check_network(config)
    _check_folders(config, dry)
    _check_plugins(config)
    _check_parser(config, dry, unchecked)
    if config.generator.engine == "vllm" and target is None:
        check_vllm()

    device, machine = _check_device(config, target, dry, unchecked)
    _check_channel(config, device, len(machine.gpus))
    told = model_config(config, fetch=not dry, unchecked=unchecked)
    if told is not None:
        check_family_of(config, told)
    teacher = _teacher(config, dry, unchecked)

    # Refused before tasks or a model are made.
    memory, written = _check_size(config, device, told, machine, unchecked, teacher, dry=dry)

    train_tasks, eval_tasks, family = _count_tasks(config, dry, unchecked)  # seconds, where a model may be gigabytes
    if family is not None and knows_tasks(family):
        check_held_out(config, family)
    _check_imitates(config, family)
    data = {} if dry or family is None else data_of(config.env.name, family)

    prepared = _prepare(config, dry, begin, unchecked)
    if not dry:
        shape_by_model(prepared.folder, replay=config.replays_routers)
    if told is None and prepared.folder is not None:
        made = read_config(prepared.folder)
        memory, written = _check_size(config, device, made, machine, unchecked, teacher, dry=dry)
    elif not dry:
        check_disk(written, config)  # a model that was fetched may have taken room on the same disk
    if family is not None and prepared.folder is not None:
        check_lengths(config, family, prepared.folder)

    if machine.name == "this machine":
        make_room(config, 0 if config.supervised else prepared.weight_bytes)
    plan = make_plan(config, device, machine.gpus, machine.nodes)
    _check_descriptors(_DESCRIPTORS + 8 * len(plan) + config.env.episodes_per_server)
    return Preflight(config, device, plan, prepared, memory, written, train_tasks, eval_tasks, data, unchecked, machine)


def _check_descriptors(needed: int) -> None:
    """The system's limit of open files is enough for the process that has the most: sockets, logs, pipes, modules."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    allowed = max(soft, _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS))
    if allowed < needed:
        raise ConfigError(f"ulimit -n is {soft}: a run opens up to {needed} files at once; set ulimit -n {needed}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))  # its processes inherit it


def _installed() -> bool:
    """Whether this is the complete installation, and not the small one of a dry run before it."""
    return find_spec("torch") is not None


def _prepare(config: Config, dry: bool, begin: Begin, unchecked: list[str]) -> Prepared:
    """A dry run needs no package of the learner or the engine: it may come before gigabytes are installed."""
    if dry and not _installed():
        unchecked.append("algo and model: torch is not installed yet")
        return Prepared(None, 0)

    path = config.model.path
    if dry and not any(Path(path).glob("*.safetensors")):
        unchecked.append(f"the weights of model.path={path!r}")
    if dry and (warm := config.model.warm_start).demonstrations:
        unchecked.append(f"a run first trains it on {warm.demonstrations} demonstrations, {warm.steps} steps")
    prepared = prepare(config, make=not dry, begin=begin)
    if config.algo.teacher is not None and prepared.teacher is None and (dry or is_endpoint(config.algo.teacher)):
        unchecked.append(f"whether algo.teacher={config.algo.teacher!r} shares the student's vocabulary")
    return prepared


def _check_device(config: Config, target: Machine | None, dry: bool, unchecked: list[str]) -> tuple[str, Machine]:
    """`cpu` or `cuda`, and the machine of the plan: it has the plan's GPUs, or nothing is known of it."""
    machine = this_machine() if target is None else target
    if config.cluster.count:  # of its machines nothing is known before their agents come
        if config.device == "auto":
            raise ConfigError("device=auto: the machines of a cluster are not asked; set device to cpu or cuda")
        return config.device, Machine(name="the machines of the cluster")
    device = config.device if config.device != "auto" else "cuda" if machine.gpus else "cpu"
    alone = device == "cpu" and config.generator.tensor_parallel == 1
    if config.generator.engine == "vllm" and engine_options(config.generator).own_process is False and not alone:
        raise ConfigError(
            "generator.options.own_process=false: only for device=cpu with generator.tensor_parallel=1; leave it out"
        )

    visible = len(machine.gpus)
    needed = gpus_needed(config, visible)
    if device == "cuda" and visible < needed:
        shortage = f"the plan needs {needed} GPUs, {machine.name} shows {visible}"
        if target is not None or not dry:
            share = gpus_needed(config.model_copy(update={"placement": "shared"}), visible) <= visible
            cure = "set placement=shared" if share else "lower generator.count or learner.ranks, or set device=cpu"
            raise ConfigError(f"device=cuda: {shortage}; {cure}")
        unchecked.append(f"{shortage}; name the machine that it is for: --gpus 8x80 --host-memory 1T --cores 192")
        machine = Machine()
    return device, machine


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
    meta = _resume_from(config, read_meta)  # says what is missing; the files themselves are read once, by `make_run`
    if meta is not None and 0 < config.steps <= meta.step:
        trained = f"resume={str(config.resume)!r} has trained {meta.step} already"
        raise ConfigError(
            f"steps={config.steps}: {trained}, and steps counts all; set it above, or to 0 to evaluate only"
        )
    if meta is not None and config.learner.kind != "simulated":
        _check_adapters(config, meta)


def _check_adapters(config: Config, meta: Meta) -> None:
    """Of other adapters a checkpoint would be read in part, or count with another weight. Raises ConfigError."""
    options = lora_options(config.model)
    ours = options.identity() if options else None
    if ours != meta.lora_options:
        trained = f"resume={str(config.resume)!r} was trained with model.lora={meta.lora_options or 'null'}"
        raise ConfigError(f"model.lora={ours or 'null'}: {trained}; set it so, or begin anew with resume=new")


def _check_options(config: Config) -> None:
    """Check the options of engine and learner; the environment's are checked with its tasks."""
    lora_options(config.model)
    engine = engine_options(config.generator)
    validated(LEARNER_OPTIONS[config.learner.kind], config.learner.options, "learner.options")

    tokens: int | None = getattr(engine, "max_num_batched_tokens", None)
    sequences = config.generator.max_num_seqs
    if tokens is not None and tokens < sequences:
        raise ConfigError(
            f"generator.options.max_num_batched_tokens={tokens}: one engine step needs a token for each of "
            f"generator.max_num_seqs={sequences} sequences"
        )


def _check_plugins(config: Config) -> None:
    """Hooks of every role, and what the broker makes and keeps in its log.

    Environment and algorithm are checked with their options.
    """
    rules = Rules.of(config, train_tasks=1)
    core = BrokerCore(rules)
    ProxyCore(hooks=config.rollout.hooks)
    make_hooks("env_server", config.rollout.hooks, print, print)

    _check_kept(core, rules)
    register_configured(config.algo.all_columns)
    check_launcher(config.launcher)


def _check_kept(core: BrokerCore, rules: Rules) -> None:
    """What curriculum, priority and hooks hold comes back from the broker's log as it was, after a draw and an end."""

    def written(core: BrokerCore) -> bytes:
        return msgspec.msgpack.encode(keep(Intake(core, 0)).state)

    fresh = BrokerCore(rules)
    try:
        _, task = core.groups.tasks.take()
        record = GroupRecord(0, task.task_index, "trained", 0, 0, [0.0, 1.0], seconds=1.0, success=0.5)
        core.groups.tasks.source.ended(record)
        state = msgspec.msgpack.decode(written(core))
        restore(Intake(fresh, 0), Kept(state, []))
        lost = "" if msgspec.msgpack.decode(written(fresh)) == state else "restore(state()) makes it another one"
    except Exception as error:  # of code that is not ours
        lost = f"{type(error).__name__}: {error}"

    if lost:
        plugins = {"curriculum": rules.curriculum, "priority": rules.priority, "hooks": rules.hooks}
        named = ", ".join(f"rollout.{name}={value!r}" for name, value in plugins.items() if ":" in str(value))
        fix = "state() must return plain data for MessagePack, and restore(state) go on from it"
        raise ConfigError(f"{named}: the broker's log cannot keep its state ({lost}); {fix}") from None


def _check_parser(config: Config, dry: bool, unchecked: list[str]) -> None:
    """The names of vLLM's parsers. Whether they fit the model is known when they have been imported."""
    try:
        check_names(config.chat)
    except ModuleNotFoundError:
        if not dry:
            raise ConfigError(f"chat.parser={config.chat.parser!r}: vLLM is not installed; install it") from None
        unchecked.append(f"chat.parser={config.chat.parser!r}: vLLM is not installed yet")


def _teacher(config: Config, dry: bool, unchecked: list[str]) -> ModelShape | None:
    """The shape of a teacher that computes here, if its `config.json` can be read already. Raises ConfigError."""
    path = config.algo.teacher
    if path is None or not (config.steps and has_own_teacher(config)):
        return None
    if dry and not Path(path).exists() and not may_be_on_hub(path):
        unchecked.append(f"algo.teacher={path!r}: there is no such folder yet, without which a run is refused")
        return None
    named = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    said: list[str] = []

    try:
        told = model_config(named, fetch=not dry, unchecked=said)
        shape = None if told is None else shape_of(named, told)
        if shape is not None:
            check_longest(named, shape, f"model.path={path!r}")
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path", "algo.teacher", 1)) from None
    unchecked += (each.replace("model.path", "algo.teacher", 1) for each in said)
    return shape


def _check_channel(config: Config, device: str, visible: int) -> None:
    """`nccl` needs a GPU of its own on both sides, `ipc` one that both share, and `tcp` addresses."""
    channel = config.channel
    if channel == "tcp" and config.network.transport != "tcp":
        raise ConfigError("weights.transport='tcp': network.transport=ipc has no addresses; set weights.transport=auto")

    if channel not in DEVICE_CHANNELS:
        return
    why = fix = ""
    generator = config.generator

    if device == "cpu" or not config.steps:
        why = "it goes from GPU to GPU, and " + ("device=cpu" if device == "cpu" else "steps=0 leaves a learner none")
    elif config.network.transport != "ipc":
        why = "its ends meet at a file, and network.transport=tcp has none that both see"
    elif channel == "nccl" and shares_gpus(config, visible):
        why = "NCCL refuses an engine and a learner on one GPU"

    elif channel == "ipc" and config.alternates:
        why = "its blocks stay on the GPU in the engine's turn"
    elif channel == "ipc" and (generator.count, generator.tensor_parallel, config.learner.ranks) != (1, 1, 1):
        counts = f"generator.count={generator.count}, generator.tensor_parallel={generator.tensor_parallel}"
        why = f"it is for one engine of one GPU and one rank, not {counts}, learner.ranks={config.learner.ranks}"
    elif channel == "ipc" and not shares_gpus(config, visible):
        why = f"it goes within one GPU, and placement={config.placement} gives engine and learner one each"
        fix = "placement=shared, or "

    if why:
        raise ConfigError(f"weights.transport={channel!r}: {why}; set {fix}weights.transport=auto")


def _check_size(
    config: Config,
    device: str,
    told: Mapping[str, Any] | None,
    machine: Machine,
    unchecked: list[str],
    teacher: ModelShape | None,
    *,
    dry: bool,
) -> tuple[list[Need], Written]:
    """What processes hold, and what is left on the disk of this machine. Raises ConfigError where that is too much."""
    _check_threads(config, device, machine)
    model = None
    if told is not None:
        model = shape_of(config, told)
        check_context(config, device, model)
    elif config.model.path == "tiny" and config.generator.engine == "vllm":
        unchecked.append("memory is estimated without the model, which a run makes")

    if device == "cuda" and machine.gpus and machine.gpu_memory is None:
        if shares_gpus(config, len(machine.gpus)):
            raise ConfigError(
                f"placement={config.placement}: {machine.name} does not say how much memory a GPU has, of which an "
                "engine and a rank would have a part each; set placement=apart"
            )
        unchecked.append(f"{machine.name}: how much memory a GPU has; name it, for instance 8x80")

    needs = estimate(config, device, model, machine, teacher)
    check_memory(needs, machine)

    meta = _resume_from(config, read_meta)
    written = written_by(config, model, told or {}, meta.step if meta is not None else 0)
    if not dry or machine.name == "this machine":
        check_disk(written, config)
    return needs, written


def _check_threads(config: Config, device: str, machine: Machine) -> None:
    cores = sum(map(len, machine.nodes.values()))
    for field, threads in (("generator", config.generator.threads), ("learner", config.learner.threads)):
        if device == "cpu" and cores and threads > cores:
            raise ConfigError(f"{field}.threads={threads}: {machine.name} gives us {cores} cores; at most that many")


def _count_tasks(config: Config, dry: bool, unchecked: list[str]) -> tuple[int, int, EnvironmentFamily | None]:
    try:
        validate_options(config)
    except ConfigError as error:
        if not (dry and not _installed() and isinstance(error.__cause__, ModuleNotFoundError)):
            raise
        unchecked.append(f"env.name={config.env.name!r}: {error.__cause__.name} is not installed yet")
        return 0, 0, None

    source = str(config.env.options.get("source", ""))
    on_hub = "/" in source and not source.startswith(("/", ".")) and not Path(source).exists()
    if dry and on_hub:
        unchecked.append(f"env.options.source={source!r} is not read in a dry run")
        return 0, 0, None

    train_tasks, eval_tasks, family = validate_env(config, dry)
    groups = config.rollout.groups_per_batch
    if train_tasks < groups:
        raise ConfigError(
            f"rollout.groups_per_batch={groups}: env {config.env.name!r} has only {train_tasks} training tasks"
        )
    return train_tasks, eval_tasks, family


def _check_imitates(config: Config, family: EnvironmentFamily | None) -> None:
    """Rows to be imitated and a learner that does so come together. Raises ConfigError."""
    if family is not None and config.supervised != getattr(family, "imitated", False):
        raise ConfigError(
            f"learner.kind={config.learner.kind!r} does not fit env.name={config.env.name!r}: rows are imitated by "
            "`fresco sft DATA`, and `fresco run` plays an environment"
        )


def _check_network(config: Config) -> None:
    """Processes bind ports that are free; the address must be one of this machine."""
    if config.network.transport != "tcp":
        return
    host = config.network.host
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((numeric(host), 0))
    except OSError as error:
        raise ConfigError(f"network.host={host!r}: no address of this machine ({error.strerror})") from None
    if config.cluster.count and config.cluster.engine != "local" and numeric(host).startswith("127."):
        raise ConfigError(f"network.host={host!r}: no other machine reaches it; name this machine's own address")
    if numeric(host) == "0.0.0.0":
        raise ConfigError(f"network.host={host!r}: nobody can connect to it; name the address that others use")


def make_run(checked: Preflight, started: float) -> RunFile:
    """The run's folder and run.json. An earlier folder of the same name is kept beside it, numbered.

    Raises ConfigError if it is that of a run that is going on.
    """
    config = checked.config
    folder = (config.runs / config.name).absolute()
    with _only_start(folder):
        meta = _resume_from(config, verify)
        if meta is not None:
            _check_journal(checked, meta)
        if folder.exists():
            config = _set_aside(folder, config)
        folder.mkdir(parents=True)
        _locks[folder] = _lock(folder / "lock", config.name)
        if meta is not None:
            write_history(folder, config, meta.step)

    run = RunFile(
        config=config,
        run_id=uuid.uuid4().hex[:8],
        folder=folder,
        socket_folder=_socket_folder(folder),
        device=checked.device,
        timeline=meta.timeline + 1 if meta else 0,
        start_step=meta.step if meta else 0,
        model_folder=checked.prepared.folder,
        teacher_folder=checked.prepared.teacher,
        train_tasks=checked.train_tasks,
        data=checked.data,
        eval_tasks=min(checked.eval_tasks or config.eval.tasks, config.eval.tasks),
        beside_learner=shared_with_learner(checked.memory),
        saved_bytes=checked.written.at_end,
        started_at=started,
    )

    make_curve_key(folder)
    run.save()
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    return run


@contextlib.contextmanager
def _only_start(folder: Path) -> Iterator[None]:
    """Let one start go on: of starts of one name at once the first goes on; the others end as if its run had begun.

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


def hold(folder: Path, name: str) -> None:
    """Keep others from going on with the run of this folder while this process lives. Raises ConfigError."""
    _locks[folder] = _lock(folder / "lock", name)


def _lock(path: Path, name: str) -> FileLock:
    """The lock of a run of this name while it goes on. Raises ConfigError when another process has it."""
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
    with Refusing(f"resume={str(config.resume)!r}", CheckpointError):
        return read(config.resume)


def _check_journal(checked: Preflight, meta: Meta) -> None:
    """The broker can go on from the journal with this configuration and these data. Raises ConfigError."""
    config = checked.config
    assert config.resume is not None
    resume = f"resume={str(config.resume)!r}"
    damaged = Refusing(f"{resume}: its journal is damaged", TypeError, AttributeError)
    with damaged, Refusing(resume, CheckpointError, ValueError, LookupError, msgspec.MsgspecError):
        if config.supervised:
            check_journal(read_journal(config.resume), checked.data, config)
            return

        state = msgspec.msgpack.decode(read_journal(config.resume))
        core = BrokerCore(Rules.of(config, checked.train_tasks, meta.step), data=checked.data)
        core.restore(state, new_data=config.resume_data == "new")


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
