"""The configuration tree: one typed place for every default, with help text beside each field.

Unknown keys are refused and the nearest valid key is named. A recipe is a YAML file; `key=value`
overrides are applied on top (`load_config("experiments/math_cpu.yaml", ["rollout.alpha=2"])`).
Options that belong to a plug-in (a loss, an environment) are free-form here and validated against
the plug-in's own model when the run is planned, before any process starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator, model_validator

from rl.config.alarms import AlarmsConfig
from rl.config.algo import AlgoConfig
from rl.config.chat import ChatConfig
from rl.config.rollout import RolloutConfig
from rl.config.section import Section
from rl.config.tree import OPTIONS_OF, apply_override, forget_options, read_recipe
from rl.config.tree import ConfigError as ConfigError
from rl.config.tree import nearest as nearest

Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
DecayRate = Annotated[float, Field(ge=0, lt=1)]


class WarmStartConfig(Section):
    demonstrations: int = Field(0, ge=0)
    """Episodes of the environment's demonstrator to imitate before RL; 0: none. Made once and kept."""
    mistakes: float = Field(0.1, ge=0, lt=1)
    """Share of the demonstrator's turns that are mistakes in every other episode: shown with the way out of them, not
    imitated."""
    slips: float = Field(0.0, ge=0, lt=1)
    """Share of all turns in which what was right elsewhere is written and imitated, so that RL begins with a model that
    knows its task and errs. For environments that know their own solutions."""
    steps: int = Field(400, ge=1)
    """Supervised optimizer steps."""
    batch: int = Field(32, ge=1)
    """Demonstrations of one step."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate: linear warm-up, then a cosine down to a tenth."""
    warmup_steps: int = Field(20, ge=1)
    """Steps of linear warm-up."""
    read_weight: float = Field(0.0, ge=0)
    """Weight of the loss on the environment's text, beside that on the imitated commands: answers repeat names from the
    commands, so a small model learns sooner to copy. 0 for a model that can read already."""
    seed: Seed = 0
    """Of the demonstrations, their order, and a tiny model's initial weights."""


class ModelConfig(Section):
    path: str = "tiny"
    """`tiny` (made and warm-started locally), a local folder, or a hub name (`Qwen/Qwen3-8B`)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype of the learner's forward and backward; master weights are always float32."""
    untested: bool = False
    """Train a model of a family that no test has (`docs/models.md` lists those that one has)."""
    tiny: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the tiny model's recipe (size, warm-start steps); see `launch/warm_start/tiny.py`."""
    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig)


class SamplingConfig(Section):
    max_tokens: int = Field(256, ge=1)
    """Longest response of one turn, in tokens."""
    temperature: float = Field(1.0, ge=0.01, le=100)
    """Sampling temperature; the learner divides its logits by the same number."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Must be 1 in training: a truncated distribution biases every importance ratio."""
    top_k: int = Field(0, ge=0)
    """0 = off; must be off in training, for the same reason."""
    seeded: bool = False
    """Seed every request from (run seed, sample id, turn), for tests that compare two runs exactly."""


class SimulatedEngineConfig(Section):
    prefill_tokens_per_s: float = Field(1e6, gt=0)
    """Prompt tokens processed per second."""
    decode_base_s: float = Field(0.0005, ge=0)
    """Seconds of one decode step at batch 1."""
    decode_per_seq_s: float = Field(0.00001, ge=0)
    """Additional seconds of one decode step per further running sequence."""
    length_mean: float = Field(24, gt=0)
    """Mean response length in tokens."""
    length_sigma: float = Field(0.5, ge=0)
    """Sigma of the log-normal length distribution (0: constant length)."""
    load_s: float = Field(0.0, ge=0)
    """Seconds that a weight load takes."""
    vocab_size: int = Field(128, ge=2, lt=1 << 31)
    """Ids are drawn uniformly from [1, vocab_size)."""


class GeneratorConfig(Section):
    engine: Literal["vllm", "simulated"] = "vllm"
    """`vllm`: the real engine. `simulated`: a seeded timing model, for timing and fault tests."""
    count: int = Field(1, ge=1)
    """Generator processes: one per GPU or per tensor-parallel group."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one generator."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the engine, and of the weights on the wire."""
    max_model_len: int = Field(2048, ge=16)
    """Longest context (prompt and response), in tokens."""
    max_num_seqs: int = Field(64, ge=1, le=1_000_000)
    """Sequences decoded together by one engine."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Tokens of one engine step; None: large enough for a whole context."""
    kv_cache_bytes: int | None = Field(64 << 20, ge=1)
    """KV cache of one engine; None (GPU only): what gpu_memory_utilization leaves."""
    kv_admission: Literal["expected", "whole"] = "expected"
    """What a request reserves of it: prompt and mean response (vLLM pre-empts and recomputes where that is too
    little), or prompt and max_tokens."""
    kv_block: int | None = Field(None, ge=16, multiple_of=16)
    """Tokens of one KV block, the grain of prefix reuse between the turns of an episode; None: 32 on CPU (vLLM's own
    128 there is longer than many an episode), vLLM's default on GPUs."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Fraction of a GPU's memory for the engine."""
    enforce_eager: bool = True
    """No CUDA graphs; always true on CPU."""
    on_update: Literal["recompute", "keep", "abort", "drain"] = "recompute"
    """What a weight update does to running requests: compute their context again, keep what is cached of it, discard
    what they have sampled and begin again, or wait for their end (at most `drain_deadline_s`)."""
    drain_deadline_s: float = Field(30.0, gt=0)
    """Longest wait of `drain` before it falls back to `recompute`."""
    max_restarts: int = Field(3, ge=0)
    """Times that a dead generator is started again before the run stops."""
    threads: int = Field(1, ge=1)
    """CPU threads of one engine (CPU only)."""
    own_process: bool | None = None
    """vLLM's core in a process beside the generator's. None: on GPUs, and with tensor_parallel above 1. On a CPU it has
    a thread of the generator, because messages between the two would cost more than they gain."""
    simulated: SimulatedEngineConfig = Field(default_factory=SimulatedEngineConfig)


class EnvConfig(Section):
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
    max_restarts: int = Field(3, ge=0)
    """Times that a dead server, or the process of parsers, is started again before the run stops."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment, validated against its own model."""


class LearnerConfig(Section):
    kind: Literal["fsdp", "simulated"] = "fsdp"
    """`simulated` trains nothing, in `simulated_step_s` seconds, without torch."""
    simulated_step_s: float = Field(0.05, ge=0)
    """Seconds of one simulated training step."""
    simulated_weight_bytes: int = Field(1 << 20, ge=64)
    """Size of the simulated weights, really transported."""
    ranks: int = Field(1, ge=1)
    """K: FSDP ranks, one process each."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up, until the last step."""
    min_lr_fraction: float = Field(0.0, ge=0, le=1)
    """Final learning rate of `linear` and `cosine`, as a fraction of lr."""
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this global norm."""
    minibatches: int = Field(1, ge=1)
    """Optimizer steps per batch (the batch is split by whole groups)."""
    max_tokens_per_pack: int = Field(2048, ge=16)
    """Tokens of one forward; a longer sample gets a pack of its own."""
    logprob_chunk: int = Field(256, ge=1)
    """Tokens per chunk of the log-probability head."""
    activation_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more time."""
    threads: int = Field(1, ge=1)
    """CPU threads of one rank."""
    checkpoint_every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    max_restarts: int = Field(3, ge=0)
    """Times that the ranks, all together, are started again after a death; also those of broker and of proxy."""
    batch_deadline_s: float = Field(900.0, gt=0)
    """Longest wait for a batch while no answer begins, grows or ends, and no episode does; then the run stops."""


class WeightsConfig(Section):
    transport: Literal["shm", "zmq"] = "shm"
    """`shm`: one node. `zmq`: tcp frames, works without shared memory."""
    slots: int = Field(3, ge=2)
    """Versions held at once; two suffice, three never make the learner wait for a slow reader."""
    deadline_s: float = Field(30.0, gt=0)
    """Longest standstill of a load (no byte read, checked or loaded, no token sampled), and longest wait for a slot."""
    probe: bool = True
    """Compare the engine's log-probabilities of a short text of the run with the learner's after each update."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest accepted mean |difference| in nats; None: 1e-3 for float32, 0.1 for bfloat16 (rl/weights/proof.py)."""


class EvalConfig(Section):
    every: int = Field(0, ge=0)
    """Steps between evaluations; 0: first and last only (tasks=0: none at all)."""
    tasks: int = Field(0, ge=0)
    """Held-out tasks per evaluation."""
    temperature: float = Field(0.0, ge=0)
    """0: greedy."""


class TrackingConfig(Section):
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto`: online when an account is configured, else offline."""
    project: str = "fresco"
    """wandb project."""
    save_batches: bool = False
    """Keep every trained batch as `<run>/batches/<step>.<rank>.msgpack` (rl/store/batch_files.py reads them)."""
    samples: float = Field(0.05, ge=0, le=1)
    """Share of training groups whose conversations are kept in `<run>/samples` (`fresco show` prints them); those of
    evaluations are kept in full."""
    trace: Literal["off", "steps", "full"] = "full"
    """What each process writes of its life to `<run>/trace` (`fresco trace`, `fresco top`). `steps`: the learner's
    waits and phases, weight loads, deaths; `full`: also every ticket's trace_events."""
    live: bool = True
    """Progress table in the terminal (plain lines when it is not a terminal)."""

    @field_validator("trace", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        """YAML reads `off` as false."""
        return "off" if value is False else value


class NetworkConfig(Section):
    transport: Literal["ipc", "tcp"] = "ipc"
    """`ipc`: Unix sockets in the run folder, one node. `tcp`: also across nodes."""
    host: str = "127.0.0.1"
    """Address that tcp sockets bind and connect to."""
    base_port: int = Field(21000, ge=1024, le=65000)
    """First of the consecutive ports used by tcp. Keep them below those the kernel gives to outgoing connections
    (on Linux from 32 768 on): there, any program may hold one for a moment."""
    curve: bool = True
    """Encrypt and authenticate every socket with a CURVE key of the run. Without it, whoever reaches one may speak."""


class TimeoutsConfig(Section):
    start_s: float = Field(180.0, gt=0)
    """Longest time until a process registers; an engine starts after that (`hang_s`)."""
    heartbeat_s: float = Field(0.5, ge=0.01)
    """Period of heartbeats."""
    hang_s: float = Field(60.0, gt=0)
    """A process whose heartbeats stop, or which is busy without progress for this long, is killed. An engine that
    starts makes progress while it uses the processor or reads."""
    save_s: float = Field(120.0, gt=0)
    """Longest wait after Ctrl-C for the step that is being trained and its checkpoint; a second Ctrl-C ends at once."""
    stop_s: float = Field(6.0, gt=0)
    """Orderly shutdown before what is left is killed."""


class Config(Section):
    name: str = "run"
    """Name of the run; its folder is `<runs>/<name>`."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    seed: Seed = 0
    """Seed of data order, sampling seeds and initialisation."""
    steps: int = Field(100, ge=0, le=1_000_000_000)
    """Batches to train; a run with `resume` trains as many more. 0: evaluate only (what `fresco eval` does)."""
    seconds: float | None = Field(None, gt=0)
    """Of training, the evaluation of the first version apart: the first batch that is complete after them is the last,
    if `steps` do not end the run before. `learner.schedule` follows whichever is nearer to its end."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engines and ranks run; `auto` is cuda where the driver lists a GPU."""
    resume: Path | None = None
    """A checkpoint folder to continue from."""
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
    network: NetworkConfig = Field(default_factory=NetworkConfig)
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

        if self.sampling.top_p != 1 or self.sampling.top_k != 0:
            raise ValueError(
                f"sampling.top_p={self.sampling.top_p}, sampling.top_k={self.sampling.top_k}: "
                "training needs top_p=1 and top_k=0, else importance ratios are biased"
            )

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

        if (self.generator.max_num_batched_tokens or self.generator.max_num_seqs) < self.generator.max_num_seqs:
            raise ValueError(
                f"generator.max_num_batched_tokens={self.generator.max_num_batched_tokens}: one engine step needs a "
                f"token for each of generator.max_num_seqs={self.generator.max_num_seqs} sequences"
            )

        if self.rollout.groups_per_batch % self.learner.minibatches:
            raise ValueError(
                f"learner.minibatches={self.learner.minibatches} must divide "
                f"rollout.groups_per_batch={self.rollout.groups_per_batch}"
            )

        first = self.rollout.first_episodes
        if first and not (self.rollout.filter_constant_groups and 2 <= first < self.rollout.group_size):
            raise ValueError(
                f"rollout.first_episodes={first} needs rollout.filter_constant_groups=true, and must be 0, or at least "
                f"2 and less than rollout.group_size={self.rollout.group_size}"
            )
        return self

    @property
    def batch_size(self) -> int:
        """N = B * G: samples of one batch."""
        return self.rollout.groups_per_batch * self.rollout.group_size


def load_config(path: str | Path | None, overrides: list[str] | None = None) -> Config:
    """Read a YAML recipe and apply `key=value` overrides.

    A recipe may name another one under `base:` (relative to itself) whose values it extends.
    Raises ConfigError with one line that names the field, the value and the fix.
    """
    tree = read_recipe(Path(path)) if path is not None else {}
    for item in overrides or []:
        name, _, value = item.partition("=")
        if name in OPTIONS_OF:
            forget_options(tree, name, value)
    for item in overrides or []:
        apply_override(tree, item)
    return validate(tree)


def validate(tree: dict[str, Any]) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None


def _describe(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        section: Any = Config
        for part in first["loc"][:-1]:
            listed = isinstance(part, int)
            section = get_args(section)[0] if listed else section.model_fields[str(part)].annotation
        key = str(first["loc"][-1])
        return f"unknown key {where!r}{nearest(key, list(section.model_fields))}"
    if not where:
        return first["msg"].removeprefix("Value error, ")
    return f"{where}={first['input']!r}: {first['msg'].removeprefix('Value error, ')}"
