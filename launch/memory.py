"""How much memory a run needs, on its host and on each GPU, before anything starts.

What a model takes is `rl.models.shape`'s; here it is divided among processes. A plan that needs more than the machine
has is refused with the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from launch.machine import MIB, Machine, size_text
from launch.plan import learner_computes, shares_gpus
from launch.refusing import Refusing
from rl.config.lora import lora_options, served_adapter
from rl.config.schema import Config, ConfigError
from rl.learner.simulated import simulated_options
from rl.models.shape import ModelShape, logprob_chunk
from rl.weights import DEVICE_CHANNELS
from rollout.generator.engines import engine_options
from rollout.generator.engines.environment import PROBED_AT_ONCE, kv_cache_bytes, least_cache

_MASTER = 4  # bytes of a parameter, of its gradient and of each of Adam's two moments: float32
_BATCHED_TOKENS = 8192  # of one engine step, at least (`vllm_settings`)
_MARGIN = 1.05  # an estimate of a learner's peak beside its peak
CONTEXT = 600 * MIB  # CUDA's own, of one process on a GPU
_EXCHANGES = 1024 * MIB  # NCCL's own, of a rank beside others; not measured
ASLEEP = 1536 * MIB  # of an engine that sleeps, CUDA's own with it; not measured
STARTING = 768 * MIB  # a driver's own, and CUDA's of vLLM, which then asks that all of its share is free; likewise
_GRAPHS = 512 * MIB  # of CUDA graphs, beside a cache whose bytes vLLM is told; likewise
_LOCKED = 2  # most that torch takes of the host for a byte in locked pages (`ModelShape.locked`)
_SHARE = "share of a GPU"
_CURES = {"learner.ranks": "learner.ranks, learner.optimizer_states"}
"""What else may help beside a field, by the field."""

# A process at rest, its libraries imported (measured on CPU, rounded up).
_AT_REST = {
    "vllm": 1400 * MIB,
    "fsdp": 700 * MIB,
    "supervised": 700 * MIB,
    "simulated": 60 * MIB,
    "env_server": 100 * MIB,
    "parsers": 500 * MIB,
    "teacher": 700 * MIB,
}


@dataclass(frozen=True)
class Need:
    """What `count` like processes or GPUs need: bytes of each, by purpose. `field` is what to change if it is too much.

    share: of its GPU, which it may take. beside: what has the rest.
    """

    what: str
    where: Literal["host", "gpu"]
    count: int
    parts: dict[str, int]
    field: str
    share: float = 1.0
    beside: str = ""
    remarks: tuple[str, ...] = ()
    """What it means for the run, in words."""

    @property
    def each(self) -> int:
        return sum(self.parts.values())

    def left(self, gpu: int) -> int:
        """Bytes that stay free of a GPU with so many, or of its share of one that it has not for itself."""
        return int(gpu * self.share if self.beside else gpu) - self.each

    def __str__(self) -> str:
        held = ", ".join(f"{name} {size_text(size)}" for name, size in self.parts.items() if size)
        return f"{self.count} × {self.what}: {size_text(self.each)} each ({held})"


def shape_of(config: Config, told: Mapping[str, Any]) -> ModelShape:
    """The shape of the model whose `config.json` this is. Raises ConfigError where it lacks what a language model says
    of itself."""
    with Refusing(f"model.path={config.model.path!r}"):
        return ModelShape.of(told)


def estimate(
    config: Config,
    device: str,
    model: ModelShape | None,
    machine: Machine | None = None,
    teacher: ModelShape | None = None,
) -> list[Need]:
    """The needs of every kind of process, and of every kind of GPU where `device` is `cuda`.

    `model` or `teacher` None (it is simulated, or not here yet): only what does not depend on it. An engine's cache,
    where no bytes are given for it, takes what is left of a GPU of `machine`.
    """
    needs = [] if config.supervised else [_environments(config), _samples(config, model)]
    if config.chat.vllm_names:
        needs.append(Need("process of parsers", "host", 1, {"process": _AT_REST["parsers"]}, "chat.parser"))

    if config.algo.teacher is not None:
        loads = {"weights": teacher.trained * _MASTER} if teacher else {}  # before they are cast
        on_host = {} if device == "cuda" else loads
        needs.append(Need("teacher", "host", 1, {"process": _AT_REST["teacher"]} | on_host, "algo.teacher"))
        if loads and device == "cuda":
            needs.append(Need("teacher's GPU", "gpu", 1, loads | {"CUDA": CONTEXT}, "algo.teacher"))

    engine_at_rest = {"process": _AT_REST[config.generator.engine]}
    learner_at_rest = {"process": _AT_REST[config.learner.kind]}
    if model and device == "cuda":
        needs += _on_gpus(config, model, machine or Machine())
    elif model and config.generator.engine == "vllm" and not config.supervised:
        engine_at_rest |= _engine(config, model, device) | {"KV cache": kv_cache_bytes(config.generator, device) or 0}
    if model and learner_computes(config):
        learner_at_rest |= _learner(config, model, device) if device == "cpu" else {}
        learner_at_rest |= _states(config, model)

    if model and device == "cuda" and config.alternates:
        locked = model.locked(config.learner.ranks // config.learner.copies)
        learner_at_rest["moved here"] = int(locked * sum(_moved(config, model).values()))
        if served_adapter(config.model) is not None:
            weights = _engine(config, model, device)["weights"]
            engine_at_rest["weights while it sleeps"] = int(_LOCKED * config.generator.tensor_parallel * weights)

    if model and config.generator.engine == "vllm" and config.replays_routers:
        cached = next((need.parts["KV cache"] for need in needs if "KV cache" in need.parts), 0)
        engine_at_rest["routed experts"] = 2 * model.routing_bytes * cached // _cached_token(config, model)

    needs.append(Need("learner rank", "host", config.learner.ranks, learner_at_rest, "learner.ranks"))
    if config.supervised:
        return needs
    needs.append(Need("generator", "host", config.generator.count, engine_at_rest, "generator.count"))
    if config.channel in DEVICE_CHANNELS:
        return needs
    weights = version_bytes(config, model, device)
    slots = config.weights.slots * (2 if config.channel == "tcp" else 1)  # the learner's own, and the machine's
    return [*needs, Need("weight slot", "host", slots, {"weights": weights}, "weights.slots")]


def on_host(needs: Sequence[Need]) -> int:
    """Bytes of the host's memory that all of them take."""
    return sum(need.count * need.each for need in needs if need.where == "host")


def check_memory(needs: Sequence[Need], machine: Machine) -> None:
    """Raises ConfigError where the host, or one GPU, is too small; what is not known of the machine is not checked."""
    total = on_host(needs)
    if machine.memory is not None and total > machine.memory:
        largest = max((need for need in needs if need.where == "host"), key=lambda need: need.count * need.each)
        raise ConfigError(
            f"{largest.field}: the run needs about {size_text(total)} of memory and {machine.name} has "
            f"{size_text(machine.memory)}; most of it for {largest}; lower {largest.field}"
        )

    gpu = machine.gpu_memory
    for need in sorted(needs, key=lambda need: need.each, reverse=True):
        if need.where == "gpu" and gpu is not None and need.each > need.share * gpu:
            part = (
                f", of which generator.options.gpu_memory_utilization leaves {need.share:g}" if need.share < 1 else ""
            )
            if need.beside:
                part = f", shared with {need.beside}, which leaves {size_text(int(need.share * gpu))}"
            cures = _CURES.get(need.field, need.field)
            if need.what.endswith(_SHARE):
                cures += ", placement=alternate"
            raise ConfigError(f"{need.field}: {need}, and a GPU has {size_text(gpu)}{part}; see {cures} and model.path")


def check_longest(config: Config, model: ModelShape, field: str) -> None:
    """A model can read the longest sequence that there can be. Raises ConfigError."""
    longest = config.generator.max_model_len
    if model.max_length is not None and longest > model.max_length:
        raise ConfigError(
            f"generator.max_model_len={longest}: the model of {field} reads at most {model.max_length} tokens"
        )


def check_context(config: Config, device: str, model: ModelShape) -> None:
    """What engine and model must agree on. Raises ConfigError."""
    check_longest(config, model, f"model.path={config.model.path!r}")
    split = config.generator.tensor_parallel
    if model.kv_heads % split and split % model.kv_heads:
        raise ConfigError(
            f"generator.tensor_parallel={split} does not divide the {model.kv_heads} key-value heads of the model"
        )
    if getattr(engine_options(config.generator), "expert_parallel", False) and not 1 < split <= model.count:
        raise ConfigError(
            f"generator.options.expert_parallel=true: a layer's {model.count} experts over generator.tensor_parallel="
            f"{split} ranks; it needs 2 ranks or more, with an expert each at least"
        )

    if config.generator.engine != "vllm":
        return
    cache = kv_cache_bytes(config.generator, device)
    least = least_cache(config.generator, device) * model.kv_bytes(_bytes(config.generator.dtype))
    least *= max(1, split // model.kv_heads)  # each device has a head at least
    if cache is not None and cache < least:
        raise ConfigError(
            f"generator.options.kv_cache_bytes={cache}: one context of generator.max_model_len="
            f"{config.generator.max_model_len} tokens takes {least}, with the block that vLLM keeps empty"
        )


def _environments(config: Config) -> Need:
    return Need("environment server", "host", config.env.servers, {"process": _AT_REST["env_server"]}, "env.servers")


def _samples(config: Config, model: ModelShape | None) -> Need:
    """A token waits in the broker and in a batch with its id, version, mask and log-probability, which are 16 bytes,
    and with its experts."""
    token = 16 + (model.routing_bytes if model and config.replays_routers else 0)
    rollout = config.rollout
    groups = (1 + rollout.alpha) * rollout.groups_per_batch + rollout.redundant_groups
    samples = int(groups) * (rollout.group_size + rollout.redundant_episodes)
    field = "rollout.alpha, rollout.groups_per_batch, rollout.group_size"
    return Need("sample", "host", samples, {"tokens": token * config.sampling.max_tokens}, field)


def version_bytes(config: Config, model: ModelShape | None, device: str) -> int:
    """The bytes of one version of the weights; of no model those that simulated learners hand out."""
    return _served(config, model, device) if model else simulated_options(config.learner).weight_bytes


def _served(config: Config, model: ModelShape, device: str) -> int:
    """The bytes of one version: on GPUs a tied head stays tied (`RunFile.untied`)."""
    if (lora := served_adapter(config.model)) is not None:
        return model.adapters(lora.rank, lora.named) * _bytes(config.generator.dtype)
    return (model.served if device == "cpu" else model.trained) * _bytes(config.generator.dtype)


def _engine(config: Config, model: ModelShape, device: str) -> dict[str, int]:
    """The bytes of one device of an engine without its cache, by purpose."""
    generator = config.generator
    own = model.trained * _bytes(generator.dtype) if served_adapter(config.model) else 0  # beside which adapters stand
    return {
        "weights": (own + _served(config, model, device)) // generator.tensor_parallel,
        "token table": 4 * generator.max_num_seqs * generator.max_model_len,
    }


def _engine_gpu(config: Config, model: ModelShape) -> Need:
    """On a GPU an engine tries its largest step before it sizes the cache: its activations, and the logits of all
    sequences, which sampling holds three times in float32. A probe comes when the cache is there already."""
    generator = config.generator
    options = engine_options(generator)
    tokens = options.max_num_batched_tokens or max(generator.max_model_len, _BATCHED_TOKENS)
    step = tokens * _bytes(generator.dtype) * 3 * (model.active // generator.tensor_parallel + model.hidden)
    logits = max(3 * generator.max_num_seqs, 2 * PROBED_AT_ONCE)

    parts = _engine(config, model, "cuda") | {
        "largest step": step + 4 * logits * model.vocabulary,
        "CUDA": CONTEXT + (0 if options.enforce_eager else _GRAPHS),
    }
    # vLLM sizes its cache by this share, unless it is told the bytes.
    share = 1.0 if options.kv_cache_bytes else options.gpu_memory_utilization
    devices = generator.count * generator.tensor_parallel
    return Need("engine's GPU", "gpu", devices, parts, "generator.tensor_parallel", share)


def _on_gpus(config: Config, model: ModelShape, machine: Machine) -> list[Need]:
    """The needs of an engine's GPU and of a learner's, or of their shares of one."""
    learner, engine = [], []
    if learner_computes(config):
        own = CONTEXT + (_EXCHANGES if config.learner.ranks > 1 else 0)
        parts = _learner(config, model, "cuda") | _device_slots(config, model) | {"CUDA": own}
        learner = [Need("learner's GPU", "gpu", config.learner.ranks, parts, _cure(config, parts))]
    if config.generator.engine == "vllm" and not config.supervised:
        engine = [_engine_gpu(config, model)]

    gpu = machine.gpu_memory
    given = config.generator.options.get("gpu_memory_utilization")
    if gpu is not None and shares_gpus(config, len(machine.gpus)) and config.alternates:
        learner, engine = _turns(config, model, learner[0], engine[0], gpu, given)
    elif gpu is not None and shares_gpus(config, len(machine.gpus)):
        rest = 1 - (_MARGIN * learner[0].each + STARTING) / gpu
        share = max(0.0, math.floor(rest * 1000) / 1000 if given is None else float(given))
        learner = [replace(learner[0], what=f"learner's {_SHARE}", share=1 - share, beside="an engine")]
        engine = [
            replace(engine[0], what=f"engine's {_SHARE}", share=share, beside="a learner", field=learner[0].field)
        ]
    return [*(_with_cache(config, model, need, gpu) for need in engine), *learner]


def _turns(
    config: Config, model: ModelShape, learner: Need, engine: Need, gpu: int, given: float | None
) -> tuple[list[Need], list[Need]]:
    """Each has the whole GPU but for what the other keeps while it rests. given: the engine's share, by the user.

    Raises ConfigError where that is more.
    """
    resting = CONTEXT + STARTING + (0 if _moved(config, model) else learner.parts["weights"])
    asleep = ASLEEP + engine.parts["token table"]

    most = math.floor((1 - _MARGIN * resting / gpu) * 1000) / 1000
    if given is not None and given > most:
        raise ConfigError(
            f"generator.options.gpu_memory_utilization={given}: with placement=alternate a learner at rest keeps "
            f"{size_text(resting)} of a GPU of {size_text(gpu)}; at most {most:g}, or leave it out"
        )

    kept = f"they take turns: meanwhile an engine keeps {size_text(asleep)}, and a learner {size_text(resting)}"
    share = most if given is None else given
    return (
        [
            replace(
                learner, what="learner's turn on a GPU", share=(1 - asleep / gpu) / _MARGIN, beside="an engine at rest"
            )
        ],
        [replace(engine, what="engine's turn on a GPU", share=share, beside="a learner", remarks=(kept,))],
    )


def _moved(config: Config, model: ModelShape) -> dict[str, int]:
    """The bytes that a rank moves to the host before it rests, by purpose."""
    on_host = config.learner.optimizer_states == "host"
    parts = {} if on_host else _learner(config, model, "cuda")
    return {name: parts[name] for name in ("weights", "optimizer") if name in parts}


def _device_slots(config: Config, model: ModelShape) -> dict[str, int]:
    """What a channel from device to device keeps on each rank's: its rows of several versions."""
    if config.channel not in DEVICE_CHANNELS:
        return {}
    return {"weight slots": config.weights.slots * _served(config, model, "cuda") // config.learner.ranks}


def shared_with_learner(needs: Sequence[Need]) -> tuple[float, int] | None:
    """The share of its GPU's memory that an engine beside a learner may take, and the bytes of its cache there.

    vLLM would size the cache by what all processes took meanwhile. None: engines have GPUs of their own.
    """
    return next(((need.share, need.parts["KV cache"]) for need in needs if need.beside == "a learner"), None)


def _with_cache(config: Config, model: ModelShape, need: Need, gpu: int | None) -> Need:
    """`need` with the cache that it has on this machine, of one context at least, and the sequences that it holds."""
    generator = config.generator
    token = _cached_token(config, model)
    least = least_cache(generator, "cuda") * token
    if (given := kv_cache_bytes(generator, "cuda")) is not None:
        cache = given // generator.tensor_parallel
    elif gpu is not None:
        cache = max(least, int(need.share * gpu) - need.each)
    else:
        return replace(need, parts=need.parts | {"KV cache": least})

    whole = cache // (generator.max_model_len * token)
    fit = f"{min(whole, generator.max_num_seqs)} sequences of {generator.max_model_len} tokens fit an engine at once"
    if whole < generator.max_num_seqs:
        fit += f", and up to generator.max_num_seqs={generator.max_num_seqs} shorter ones"
    remark = f"{fit}: {cache // token} tokens of KV cache"
    return replace(need, parts=need.parts | {"KV cache": cache}, remarks=(*need.remarks, remark))


def _cached_token(config: Config, model: ModelShape) -> int:
    """The bytes of a token in the cache of one device, which has keys and values of its own heads, and of at least
    one."""
    return model.kv_bytes(_bytes(config.generator.dtype)) // min(config.generator.tensor_parallel, model.kv_heads)


def _learner(config: Config, model: ModelShape, device: str) -> dict[str, int]:
    """The bytes of one rank at its peak, by purpose.

    Weights, gradients and optimizer are divided among the ranks; with the optimizer's states on the host the device has
    weights in the dtype of the forward, and no moments. With recomputation a layer keeps its input, and the peak is the
    head's, or that of one layer and of its backward.
    With adapters the model itself stands still, in the dtype of the forward, and is its own reference. A critic's
    gradients come after the policy's.
    Of a pack that ranks compute together each has its share of the tokens. Of several copies each is divided among its
    own ranks.
    """
    learner = config.learner
    together = learner.context_parallel
    number = _bytes(config.model.dtype)
    lora = lora_options(config.model)

    on_host = learner.optimizer_states == "host"
    weight = number if on_host else _MASTER  # of a whole model; those of adapters are float32
    reduced = _bytes(learner.reduce_dtype)
    gradient = number if on_host and reduced < _MASTER else _MASTER
    adapters, policy, critic = _moving(config, model)
    held = _as_held(config, model)
    still = held * number if lora else 0
    if config.algo.kl.coef and not (lora and config.algo.kl.reference == "start"):
        still += held * weight

    in_batch = config.batch_size * config.generator.max_model_len * together // learner.ranks
    tokens = min(max(learner.pack_tokens(device), config.generator.max_model_len), max(in_batch, 1))
    tokens = -(-tokens // together)
    layer = tokens * model.saved_bytes(number)
    head_moves = lora is None or "lm_head" in (lora.named or ())
    chunk = logprob_chunk(learner.logprob_chunk, model.vocabulary, device)
    head = model.head_bytes(tokens, chunk, number, moves=head_moves, reduced=reduced)

    # Weights of experts and what adapters add, as one: for the backward, which has their gradient besides.
    summed = model.experts * number if lora and "experts" in (lora.named or ()) else 0
    kept, working = model.layers * (layer + summed), max(head, summed)
    if learner.activation_checkpointing:
        kept, working = model.layers * tokens * model.hidden * number, max(head, layer * 3 // 2 + 2 * summed)
    if together > 1:
        working += tokens * model.exchanged_bytes(together, number)

    shards = learner.ranks // learner.copies
    moments = {} if on_host else {"optimizer": 2 * ((adapters + policy + critic) * _MASTER // shards)}
    return {
        "weights": (adapters * _MASTER + (policy + critic) * weight) // shards + still // shards,
        "gradients": max(adapters * _MASTER + policy * gradient, critic * gradient) // shards,
        **moments,
        "gathered": _gathered(config, model),
        "activations": kept,
        "working space": working,
    }


def _gathered(config: Config, model: ModelShape) -> int:
    """The bytes that a forward and its backward compute with, where these are copies of what is trained.

    FSDP gathers the root and two layers at a time, and receives a third one before it is taken apart. A rank that is
    alone casts them; without recomputation it keeps what it has cast. What stands in the dtype of the forward already
    is computed with as it is: behind adapters, and beside weights on the host.
    """
    learner = config.learner
    number = _bytes(config.model.dtype)
    layers = min(3 if learner.ranks > 1 else 2, model.layers)
    if learner.ranks == 1:
        adapters = lora_options(config.model) is not None and config.algo.critic is None
        compared = config.algo.kl.coef and config.algo.kl.reference != "start"  # with a whole model, without gradients
        if number == _MASTER or learner.optimizer_states == "host" or (adapters and not compared):
            return 0
        if not learner.activation_checkpointing and not adapters:
            layers = model.layers
    return (model.trained - (model.layers - layers) * model.layer) * number


def _moving(config: Config, model: ModelShape) -> tuple[int, int, int]:
    """Parameters that are trained: of adapters, of a whole policy, and of a critic."""
    lora = lora_options(config.model)
    held = _as_held(config, model)
    critic = held - model.trained + model.valuing if config.algo.critic is not None else 0
    return (model.adapters(lora.rank, lora.named), 0, critic) if lora else (0, held, critic)


def _as_held(config: Config, model: ModelShape) -> int:
    """Parameters of a model, as if each rank had as many as the one that has most.

    FSDP divides experts by whole ones: of 128, six of seven ranks have 19.
    """
    shards = config.learner.ranks // config.learner.copies
    more = -(-model.count // shards) * shards - model.count
    return model.trained + (model.layers * model.experts * more // model.count if model.count else 0)


def _states(config: Config, model: ModelShape) -> dict[str, int]:
    """The bytes that one rank has on the host of what it trains, by purpose."""
    learner = config.learner
    sharded = sum(_moving(config, model)) * _MASTER // (learner.ranks // learner.copies)
    parts = {"checkpoint": 3 * sharded} if learner.checkpoints == "background" else {}
    if learner.optimizer_states == "host":
        parts |= {"float32 weights": sharded, "fetched gradients": sharded, "moments": 2 * sharded}
    return parts


def _cure(config: Config, parts: dict[str, int]) -> str:
    """The field that takes most from a rank."""
    largest = max(parts, key=lambda part: parts[part])
    if largest == "weight slots":
        return "weights.slots"
    if largest in ("weights", "gradients", "optimizer"):
        return "learner.ranks"
    if not config.learner.activation_checkpointing:
        return "learner.activation_checkpointing"
    longest = config.generator.max_model_len
    return "learner.context_parallel" if longest > config.learner.pack_tokens("cuda") else "learner.max_tokens_per_pack"


def _bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2
