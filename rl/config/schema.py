"""The configuration tree: one typed place for every default, with help text beside each field.

Unknown keys are refused and the nearest valid key is named. A recipe is a YAML file; `key=value`
overrides are applied on top (`load_config("experiments/math_cpu.yaml", ["rollout.alpha=2"])`).
Options that belong to a plug-in (a loss, an environment) are free-form here and validated against
the plug-in's own model when the run is planned, before any process starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, model_validator

from rl.config.alarms import AlarmsConfig
from rl.config.algo import AlgoConfig
from rl.config.chat import ChatConfig
from rl.config.rollout import RolloutConfig
from rl.config.section import Section, Where
from rl.config.tree import OPTIONS_OF, TINY, apply_override, first_fault, forget_options, read_recipe, removed_fields
from rl.config.tree import ConfigError as ConfigError
from rl.config.tree import nearest as nearest

Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]
MOST_NODES = 1024
MOST_CHANGED = 0.2  # of the weights; what changed more is sent whole (weights.delta=auto)
LEASE_MARGIN = 0.25
"""Of a lease: for an agent to notice that it is over, to kill what it began, and for clocks that drift."""


class WarmStartConfig(Section):
    where = "before RL"
    demonstrations: int = Field(0, ge=0)
    """Episodes of the environment's demonstrator to imitate before RL, made once and kept; a `model.path` that is not
    the recipe's drops them."""
    mistakes: float = Field(0.1, ge=0, lt=1)
    """Share of turns that are mistakes in every other demonstration: shown with the way out of them, not imitated."""
    slips: Annotated[float, Where("environments that know their own solutions")] = Field(0.0, ge=0, lt=1)
    """Share of turns in which something wrong is imitated, so that RL begins with a model that errs."""
    steps: int = Field(400, ge=1)
    """Supervised optimizer steps."""
    batch: int = Field(32, ge=1)
    """Demonstrations of one step."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate, after a short warm-up; it falls to a tenth on a cosine."""
    read_weight: float = Field(0.0, ge=0)
    """Weight of the loss on the environment's text, from which a small model learns sooner to copy names."""
    seed: Seed = 0
    """Of the demonstrations, their order, and a tiny model's initial weights."""


class ModelConfig(Section):
    where = "learner, engines"
    path: str = TINY
    """`tiny` (made and warm-started locally), a local folder, or a hub name such as `Qwen/Qwen3-8B`."""
    dtype: Annotated[Literal["float32", "bfloat16"], Where("learner")] = "bfloat16"
    """Compute dtype of the learner's forward and backward; what is trained is always float32."""
    untested: bool = False
    """Train a model of a family that no test has; `docs/models.md` lists those that one has."""
    tiny: Annotated[dict[str, Any], Where("model.path=tiny")] = Field(default_factory=dict)
    """Size and warm start of the tiny model, in the place of those in `launch/warm_start/tiny.py`."""
    lora: Annotated[dict[str, Any] | None, Where("learner")] = None
    """Train adapters of low rank in the place of the weights, with these options (`rl/config/lora.py`); `{}`: with the
    default ones."""
    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig)


class SamplingConfig(Section):
    where = "environment servers, learner"
    max_tokens: int = Field(256, ge=1)
    """Longest response of one turn, in tokens."""
    temperature: float = Field(1.0, ge=0.01, le=100)
    """Sampling temperature; the learner divides its logits by the same number."""
    seeded: Annotated[bool, Where("tests that compare two runs")] = False
    """Draw every request from a seed of run, sample and turn."""


class GeneratorConfig(Section):
    where = "generators"
    engine: Literal["vllm", "simulated"] = "vllm"
    """`vllm` generates; `simulated` is a seeded model of its timing, for tests without a model."""
    count: int = Field(1, ge=1)
    """Generator processes: one per GPU or per tensor-parallel group."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one generator."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the engine, but not of its logits, which are float32; and of the weights on the wire."""
    max_model_len: int = Field(2048, ge=16)
    """Longest context (prompt and response), in tokens."""
    max_num_seqs: int = Field(64, ge=1, le=1_000_000)
    """Sequences decoded together by one engine."""
    on_update: Literal["recompute", "keep", "abort", "drain"] = "recompute"
    """What a weight update does to running requests: recompute their context, keep its cache, begin anew, or wait for
    their end, at most 30 s."""
    threads: Annotated[int, Where("vllm on CPUs")] = Field(1, ge=1)
    """CPU threads of one engine."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine, checked by its own model."""


class EnvConfig(Section):
    where = "environment servers"
    name: str = "math"
    """A registered environment (`envs/registry.py`) or an importable `package.module:Name`."""
    servers: int = Field(1, ge=1)
    """Environment server processes."""
    episodes_per_server: int = Field(64, ge=1, le=1_000_000)
    """Episodes that one server runs at once (its seats)."""
    max_turns: int = Field(1, ge=1, le=1_000_000)
    """Turns after which an episode is cut."""
    step_deadline_s: float = Field(30.0, gt=0)
    """Longest time of one reset or step before the ticket fails."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment, checked by its own model."""


class LearnerConfig(Section):
    where = "learner"
    kind: Literal["fsdp", "supervised", "simulated"] = "fsdp"
    """`fsdp` trains; `supervised` imitates rows (`fresco sft`); `simulated` only takes the time, without torch."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of that kind of learner, checked by its own model."""
    ranks: int = Field(1, ge=1)
    """K: FSDP ranks, one process each."""
    context_parallel: int = Field(1, ge=1)
    """Neighbouring ranks that compute each pack together, for long samples: each has a share of its tokens."""
    copies: int = Field(1, ge=1)
    """Copies of the model, each divided among `ranks / copies` neighbours: more memory, and less to send (HSDP)."""
    reduce_dtype: Annotated[Literal["float32", "bfloat16"], Where("ranks>1, optimizer_states=host")] = "float32"
    """Dtype in which ranks add up their gradients, which are kept in float32; bfloat16 sends half as much."""
    optimizer_states: Annotated[Literal["device", "host"], Where("GPUs")] = "device"
    """Where float32 weights and AdamW's moments are; `host`: a GPU holds weights in `model.dtype`, and gradients in
    `reduce_dtype`."""

    lr: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up, until the last step."""
    min_lr_fraction: Annotated[float, Where("schedule=linear or cosine")] = Field(0.0, ge=0, le=1)
    """Final learning rate, as a fraction of lr."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this global norm."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch, which is split by whole groups."""
    max_tokens_per_pack: int | None = Field(None, ge=16)
    """Tokens of one forward, a longer sample gets a pack of its own; null: 8192 on a GPU, 2048 on a CPU."""
    logprob_chunk: int | None = Field(None, ge=1)
    """Tokens per chunk of the log-probability head; null: 256 on a CPU, on a GPU as many as have 512 MiB of logits."""
    attention: Annotated[Literal["auto", "varlen", "flash", "sdpa"], Where("GPUs")] = "auto"
    """Kernel of the learner's attention; `auto` is torch's `varlen` where the GPU and the dtype allow it."""
    compile: bool = False
    """Layers and head as code that `torch.compile` makes: fewer, larger kernels, after minutes of compiling (unrun on a
    GPU)."""
    activation_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""
    router_replay: Annotated[Literal["auto", "off"], Where("mixtures of experts")] = "auto"
    """`auto`: the learner's routers choose the experts that the engine's chose; `off`: by themselves."""

    threads: Annotated[int, Where("CPUs")] = Field(1, ge=1)
    """CPU threads of one rank."""
    checkpoint_every: int = Field(100, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    checkpoints: Literal["blocking", "background"] = "blocking"
    """`background`: training goes on while a checkpoint is written from a copy in the host's memory."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    batch_deadline_s: float = Field(900.0, gt=0)
    """Longest wait for a batch while no answer, no episode and no copied file goes on; then the run stops."""

    def pack_tokens(self, device: str) -> int:
        """Of one forward. device: `cpu` or `cuda`."""
        return self.max_tokens_per_pack or (2048 if device == "cpu" else 8192)

    @model_validator(mode="after")
    def _ranks_are_shared_evenly(self) -> LearnerConfig:
        for name, count in (("context_parallel", self.context_parallel), ("copies", self.copies)):
            if self.ranks % count:
                raise ValueError(f"{name}={count} does not divide ranks={self.ranks}; set one of them")
        return self


class WeightsConfig(Section):
    where = "learner, generators"
    transport: str = "auto"
    """`shm`: shared memory; `tcp`: between machines; `zmq`: without shared memory; `nccl`: between GPUs, and `ipc`:
    within one (both unrun); `auto`: tcp or shm; or `module:NAME`."""
    delta: Annotated[Literal["auto", "always", "off"], Where("transport=tcp")] = "auto"
    """`auto`: send another machine what changed, where that is at most a fifth; `always`: whatever a machine has a base
    for; `off`: whole."""
    slots: int = Field(3, ge=2)
    """Versions held at once; two suffice, three never make the learner wait for a slow reader."""
    deadline_s: float = Field(30.0, gt=0)
    """Longest standstill of a load, and longest wait for a slot."""
    probe: bool = True
    """Compare the log-probabilities of a short text of the run in engine and learner after each update."""


class EvalConfig(Section):
    where = "broker, environment servers"
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0: first and last only."""
    tasks: int = Field(0, ge=0)
    """Held-out tasks per evaluation; 0: no evaluation at all."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of evaluations; 0: greedy."""
    samples: int = Field(1, ge=1, le=1024)
    """Samples of each held-out task: the accuracy is avg@k, with pass@k beside it."""
    sets: dict[Annotated[str, Field(pattern=r"^[\w-]{1,40}$")], str | dict[str, Any]] = Field(default_factory=dict)
    """Further held-out sets by name: a file, a hub name, or changed fields of `env.options`; `tasks` counts all."""

    @model_validator(mode="after")
    def _samples_differ(self) -> EvalConfig:
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples={self.samples} with temperature=0 are all the same: set temperature, such as 1")
        return self


class TrackingConfig(Section):
    where = "supervisor"
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: online when an account is configured, else offline."""
    project: Annotated[str, Where("wandb, trackio")] = "fresco"
    """Project of wandb and Trackio."""
    entity: Annotated[str | None, Where("wandb")] = None
    """User or team of wandb; null: your own."""
    group: Annotated[str | None, Where("wandb, trackio")] = None
    """What runs that belong together are shown under."""
    tags: Annotated[list[str], Where("wandb")] = Field(default_factory=list)
    """Tags of the run."""
    notes: Annotated[str | None, Where("wandb")] = None
    """What the run is for."""
    boards: list[Literal["tensorboard", "trackio"]] = Field(default_factory=list)
    """Dashboards beside wandb: `tensorboard` in `<run>/tensorboard` (package tensorboardX), `trackio`."""
    replay: Annotated[Literal["off", "recent", "full"], Where("broker, learner")] = "recent"
    """Batches kept for `fresco replay` (13 bytes a token): none, those since the oldest checkpoint within 5 % of the
    free disk, or all."""
    samples: Annotated[float, Where("broker")] = Field(0.05, ge=0, le=1)
    """Share of training groups whose conversations are kept for `fresco show`; those of evaluations all are."""
    trace: Annotated[Literal["off", "steps", "full"], Where("all processes")] = "full"
    """What goes to `<run>/trace`: nothing, the learner's phases and weight loads, or every ticket's life as well."""


class NetworkConfig(Section):
    where = "all processes"
    transport: Literal["ipc", "tcp"] = "ipc"
    """`ipc`: Unix sockets in the run's folder, one node; `tcp`: also across nodes."""
    host: Annotated[str, Where("transport=tcp")] = "127.0.0.1"
    """Address of this machine, at which its sockets are bound and reached, on free ports."""


class ClusterConfig(Section):
    where = "several machines"
    engine: Literal["local", "ssh", "slurm", "ray"] = "local"
    """What starts an agent on each machine: ssh, a SLURM job, a Ray actor, or (`local`) you, with `fresco join`."""
    nodes: int | list[str] = 0
    """How many machines, or their host names; 0: all stands on this one."""
    place: dict[Literal["learner", "generator", "env_server", "parsers", "teacher"], list[int]] = Field(
        default_factory=dict
    )
    """Machines of a role, counted from 1, as `{learner: [1, 2]}`; of any other role: all."""
    lease_s: float = Field(20.0, ge=1)
    """A machine without contact for so long ends all that runs on it."""

    @property
    def count(self) -> int:
        """How many machines have an agent; 0: none, and nothing of this section counts."""
        return self.nodes if isinstance(self.nodes, int) else len(self.nodes)

    @property
    def fence_s(self) -> float:
        """How long it takes until nothing runs on a machine that is cut off, for certain."""
        return self.lease_s * (1 + LEASE_MARGIN) if self.count else 0.0

    @model_validator(mode="after")
    def _machines(self) -> ClusterConfig:
        if isinstance(self.nodes, int) and not 0 <= self.nodes <= MOST_NODES:
            raise ValueError(f"nodes={self.nodes}: 0 to {MOST_NODES} machines, or a list of host names")
        if self.count and (self.engine == "ssh") != isinstance(self.nodes, list):
            raise ValueError(f"nodes={self.nodes}: host names, as nodes=[node1,node2], with engine=ssh, and only there")
        for role, numbers in self.place.items():
            if not numbers or not all(1 <= number <= self.count for number in numbers):
                raise ValueError(f"place.{role}={numbers}: machines are numbers from 1 to nodes ({self.count})")
        return self


class TimeoutsConfig(Section):
    where = "supervisor"
    start_s: float = Field(180.0, gt=0)
    """Longest time until a process registers; an engine starts after that, within `hang_s`."""
    heartbeat_s: Annotated[float, Where("all processes")] = Field(0.5, ge=0.01)
    """Period of heartbeats."""
    hang_s: float = Field(60.0, gt=0)
    """A process without heartbeats, or busy without progress, for this long is killed."""
    stop_s: float = Field(6.0, gt=0)
    """Orderly shutdown before what is left is killed; `hang_s` after the last step of a run."""


class Config(Section):
    where = "whole run"
    name: str = "run"
    """Name of the run, and of its folder in `runs`."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    seed: Seed = 0
    """Seed of data order, sampling seeds and initialisation."""
    steps: int = Field(100, ge=0, le=1_000_000_000)
    """Batches to train, those before a `resume` included; 0: evaluate only."""
    seconds: float | None = Field(None, gt=0)
    """Longest time of training, that before a `resume` included, without the first evaluation: the first batch complete
    after it is the last."""
    max_restarts: Annotated[int, Where("supervisor")] = Field(3, ge=0)
    """Restarts of each process within an hour, ranks counted together, where older ones count until a step is trained;
    one more death ends the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engines and ranks run; `auto` is cuda where the driver lists a GPU."""
    placement: Literal["auto", "apart", "shared", "alternate"] = "auto"
    """`apart`: engines and ranks have their own GPUs; `shared`: a rank is on an engine's; `alternate`: there they take
    turns (unrun); `auto`: shared on one."""
    resume: Path | None = None
    """A checkpoint's or run's folder to continue from; `auto`: the newest of this name; `new`: none; null: `auto` where
    the same configuration stopped early."""
    resume_data: Literal["same", "new"] = "same"
    """Whether a `resume` trains its checkpoint's data, or `new` ones, from their first row: what was open has ended."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    generator: GeneratorConfig = Field(default_factory=GeneratorConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    algo: AlgoConfig = Field(default_factory=AlgoConfig)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    launcher: str = "local"
    """What starts the processes: `local`, on this machine, or `package.module:Name` (docs/adding-a-launcher.md)."""
    network: NetworkConfig = Field(default_factory=NetworkConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig)
    alarms: AlarmsConfig = Field(default_factory=AlarmsConfig)
    chat: ChatConfig = Field(default_factory=ChatConfig)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.name in ("", ".", "..") or "/" in self.name:
            raise ValueError(
                f"name={self.name!r} names a folder below runs={str(self.runs)!r}: one name without a slash"
            )
        if len(self.name.encode()) > 200 or not self.name.isprintable():
            raise ValueError(f"name={self.name!r} is no name for a folder: at most 200 bytes of printable characters")

        if self.sampling.max_tokens >= self.generator.max_model_len:
            raise ValueError(
                f"sampling.max_tokens={self.sampling.max_tokens} leaves no room for a prompt in "
                f"generator.max_model_len={self.generator.max_model_len}"
            )

        if self.alarms.exact is not None and self.generator.on_update == "keep":
            raise ValueError(
                f"alarms.exact={self.alarms.exact}: generator.on_update=keep reads keys and values of older weights, "
                "so no token is exact; set generator.on_update=recompute"
            )

        if 2 * self.timeouts.heartbeat_s > self.timeouts.hang_s:
            raise ValueError(
                f"timeouts.heartbeat_s={self.timeouts.heartbeat_s}: processes would be taken for hanging; "
                f"it may be half of timeouts.hang_s={self.timeouts.hang_s} at most"
            )

        if self.rollout.groups_per_batch % self.learner.minibatches:
            raise ValueError(
                f"learner.minibatches={self.learner.minibatches} must divide "
                f"rollout.groups_per_batch={self.rollout.groups_per_batch}"
            )

        if self.cluster.count and (self.network.transport != "tcp" or self.launcher != "local"):
            raise ValueError(
                f"cluster.nodes={self.cluster.nodes}: machines talk over tcp, and agents start processes; set "
                "network.transport=tcp, network.host to this machine's address, and launcher=local"
            )
        if self.cluster.count and self.channel == "shm":
            raise ValueError(
                f"weights.transport={self.weights.transport}: no machine sees another's memory, and cluster.nodes="
                f"{self.cluster.nodes}; set weights.transport=auto"
            )

        if self.placement == "alternate" and self.cluster.count:
            raise ValueError(
                f"placement=alternate: engine and rank meet at a lock of one machine, and cluster.nodes="
                f"{self.cluster.nodes}; set placement=shared or apart"
            )

        first = self.rollout.first_episodes
        if first and not (self.rollout.filter_constant_groups and 2 <= first < self.rollout.group_size):
            raise ValueError(
                f"rollout.first_episodes={first} needs rollout.filter_constant_groups=true, and must be 0, or at least "
                f"2 and less than rollout.group_size={self.rollout.group_size}"
            )
        return self

    @property
    def supervised(self) -> bool:
        """Whether rows are imitated, so that there is nothing but a learner."""
        return self.learner.kind == "supervised"

    @property
    def alternates(self) -> bool:
        """Whether engines rest while the learner has the device, and the learner's tensors are on the host else."""
        return self.placement == "alternate" and self.steps > 0 and not self.supervised

    @property
    def channel(self) -> str:
        """What `weights.transport` comes to."""
        named = self.weights.transport
        return named if named != "auto" else "tcp" if self.network.transport == "tcp" else "shm"

    @property
    def weight_readers(self) -> int:
        """Ranks of engines, each of which reads the weights. Machines that join later begin no others: they take over
        engines of these."""
        return self.generator.count * self.generator.tensor_parallel

    @property
    def replays_routers(self) -> bool:
        """Whether engines tell whom a mixture's routers chose, and the learner's choose the same."""
        able = self.learner.kind == "fsdp" and self.generator.engine == "vllm"
        return able and self.learner.router_replay == "auto"

    @property
    def batch_size(self) -> int:
        """N = B * G: samples of one batch."""
        return self.rollout.groups_per_batch * self.rollout.group_size

    @property
    def episode_tokens(self) -> int:
        """Most tokens that an episode of one context can generate."""
        return min(self.sampling.max_tokens * self.env.max_turns, self.generator.max_model_len)


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> Config:
    """Read a YAML recipe and apply `key=value` overrides.

    A recipe may name another one under `base:` whose values it extends: one that comes with Fresco, by its name, or a
    path that is relative to itself.
    Raises ConfigError with one line that names the field, the value and the fix.
    """
    return overridden(read_recipe(path) if path is not None else {}, overrides or [])


def overridden(tree: dict[str, Any], overrides: Sequence[str]) -> Config:
    """The configuration of a tree with `key=value` overrides. Raises ConfigError."""
    for item in overrides:
        name, _, value = item.partition("=")
        if name in OPTIONS_OF:
            forget_options(tree, name, value)
    for item in overrides:
        apply_override(tree, item)
    return validate(tree)


def validate(tree: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_describe(error, tree)) from None


def _describe(error: ValidationError, tree: dict[str, Any]) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    instead = removed_fields()
    removed = [name for each in error.errors() if (name := ".".join(map(str, each["loc"]))) in instead]
    if removed:
        others = f" ({len(removed) - 1} more fields of an earlier version are named as well)" if removed[1:] else ""
        return f"{removed[0]} was removed: write {instead[removed[0]]}{others}"

    if first["type"] == "model_type" and len(first["loc"]) == 1:
        field = next(iter(getattr(Config.model_fields[where].annotation, "model_fields", {})), "FIELD")
        return f"{where}={first['input']!r}: it is a section of fields; set one, such as {where}.{field}"

    if first["type"] == "extra_forbidden":
        section: Any = Config
        for part in first["loc"][:-1]:
            section = section.model_fields[str(part)].annotation
            section = next(iter(get_args(section)), section)  # of one that may be null

        key = str(first["loc"][-1])
        sections = {name: getattr(field.annotation, "model_fields", {}) for name, field in Config.model_fields.items()}
        elsewhere = [f"{name}.{key}" for name, fields in sections.items() if key in fields]
        if elsewhere and len(first["loc"]) <= 2:
            return f"unknown key {where!r}; did you mean {' or '.join(map(repr, elsewhere))}?"
        return f"unknown key {where!r}{nearest(key, list(section.model_fields))}"
    return first_fault(error, tree)
