"""How much memory a run needs, on its host and on each GPU, before anything starts.

The estimate counts what is certain: weights, gradients, optimizer, activations, KV cache, weight slots, and what a
process takes at rest. A plan that needs more than the machine has is refused with the numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl.config.schema import Config, ConfigError
from rl.learner.simulated import simulated_options
from rollout.generator.engines import engine_options

_MIB = 1 << 20
_GIB = 1 << 30
_MASTER = 4  # bytes of a parameter, of its gradient and of each of Adam's two moments: float32

# A process at rest, its libraries imported (measured on CPU, rounded up).
_AT_REST = {
    "vllm": 1400 * _MIB,
    "fsdp": 700 * _MIB,
    "simulated": 60 * _MIB,
    "env_server": 100 * _MIB,
    "parsers": 500 * _MIB,
}

# Activations of one layer that its backward reads, in numbers per token and hidden unit: sequence of linear layers,
# norms and products, attention without its matrix (https://arxiv.org/abs/2205.05198, equation 2: 34 bytes at 2 each).
_ACTIVATIONS = 17


@dataclass(frozen=True)
class ModelShape:
    """What memory depends on; `parameters` counts the head even where it is tied, as engines hold it."""

    parameters: int
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_length: int | None = None


@dataclass(frozen=True)
class Need:
    """What `count` like processes or GPUs need: bytes of each, by purpose. `field` is what to change if it is too much.

    share: of its GPU, which it may take.
    """

    what: str
    where: Literal["host", "gpu"]
    count: int
    parts: dict[str, int]
    field: str
    share: float = 1.0

    @property
    def each(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {_text(size)}" for name, size in self.parts.items() if size)
        return f"{self.count} × {self.what}: {_text(self.each)} each ({parts})"


def read_shape(folder: Path) -> ModelShape:
    """The shape from a model's `config.json`. Raises ConfigError where it lacks what a language model says of
    itself."""
    told = json.loads((folder / "config.json").read_text())
    told = told.get("text_config", told)
    try:
        hidden = told["hidden_size"]
        heads = told["num_attention_heads"]
        layers = told["num_hidden_layers"]
        vocabulary = told["vocab_size"]
        width = told.get("intermediate_size") or 4 * hidden
    except KeyError as missing:
        raise ConfigError(f"model.path: config.json in {str(folder)!r} has no {missing}") from None

    kv_heads = told.get("num_key_value_heads") or heads
    head_dim = told.get("head_dim") or hidden // heads
    experts = told.get("num_experts") or told.get("num_local_experts") or 0

    attention = 2 * hidden * head_dim * (heads + kv_heads)
    feed_forward = 3 * hidden * (experts * told.get("moe_intermediate_size", width) if experts else width)
    parameters = layers * (attention + feed_forward) + 2 * vocabulary * hidden
    return ModelShape(parameters, layers, hidden, kv_heads, head_dim, vocabulary, told.get("max_position_embeddings"))


def estimate(config: Config, device: str, model: ModelShape | None) -> list[Need]:
    """The needs of every kind of process, and of every kind of GPU where `device` is `cuda`.

    `model` None (it is simulated, or not here yet): only what does not depend on it.
    """
    needs = [_environments(config), _samples(config)]
    if config.chat.vllm_names:
        needs.append(Need("process of parsers", "host", 1, {"process": _AT_REST["parsers"]}, "chat.parser"))

    engine = _engine(config, model) if model and config.generator.engine == "vllm" else {}
    learner = _learner(config, model) if model and config.learner.kind == "fsdp" else {}
    engine_at_rest = {"process": _AT_REST[config.generator.engine]}
    learner_at_rest = {"process": _AT_REST[config.learner.kind]}

    if device == "cuda":
        if engine:
            devices = config.generator.count * config.generator.tensor_parallel
            # vLLM sizes its cache by this share, unless it is told the bytes.
            share = 1.0 if config.generator.kv_cache_bytes else engine_options(config.generator).gpu_memory_utilization
            needs.append(Need("engine's GPU", "gpu", devices, engine, "generator.tensor_parallel", share))

        if learner:
            needs.append(Need("learner's GPU", "gpu", config.learner.ranks, learner, "learner.max_tokens_per_pack"))
    else:
        engine_at_rest |= engine
        learner_at_rest |= learner

    needs.append(Need("generator", "host", config.generator.count, engine_at_rest, "generator.count"))
    needs.append(Need("learner rank", "host", config.learner.ranks, learner_at_rest, "learner.ranks"))
    weights = (
        model.parameters * _bytes(config.generator.dtype) if model else simulated_options(config.learner).weight_bytes
    )
    return [*needs, Need("weight slot", "host", config.weights.slots, {"weights": weights}, "weights.slots")]


def check_memory(needs: list[Need], host: int, gpu: int | None) -> None:
    """Raises ConfigError where the host, or one GPU (`gpu` bytes; None: unknown), is too small."""
    on_host = [need for need in needs if need.where == "host"]
    total = sum(need.count * need.each for need in on_host)
    if total > host:
        largest = max(on_host, key=lambda need: need.count * need.each)
        raise ConfigError(
            f"{largest.field}: the run needs about {_text(total)} of memory and this machine has {_text(host)}; "
            f"most of it for {largest}; lower {largest.field}"
        )

    for need in needs:
        if need.where == "gpu" and gpu is not None and need.each > need.share * gpu:
            part = (
                f", of which generator.options.gpu_memory_utilization leaves {need.share:g}" if need.share < 1 else ""
            )
            raise ConfigError(
                f"{need.field}: {need}, and a GPU has {_text(gpu)}{part}; see {need.field} and model.path"
            )


def check_context(config: Config, model: ModelShape) -> None:
    """What engine and model must agree on. Raises ConfigError."""
    longest = config.generator.max_model_len
    if model.max_length is not None and longest > model.max_length:
        raise ConfigError(
            f"generator.max_model_len={longest}: the model of model.path={config.model.path!r} reads at most "
            f"{model.max_length} tokens"
        )

    split = config.generator.tensor_parallel
    if model.kv_heads % split and split % model.kv_heads:
        raise ConfigError(
            f"generator.tensor_parallel={split} does not divide the {model.kv_heads} key-value heads of the model"
        )

    cache = config.generator.kv_cache_bytes
    context = longest * _kv_bytes_per_token(config, model)
    if config.generator.engine == "vllm" and cache is not None and cache < context:
        raise ConfigError(
            f"generator.kv_cache_bytes={cache}: one context of generator.max_model_len={longest} tokens takes {context}"
        )


def _environments(config: Config) -> Need:
    return Need("environment server", "host", config.env.servers, {"process": _AT_REST["env_server"]}, "env.servers")


def _samples(config: Config) -> Need:
    """A token waits in the broker and in a batch with its id, version, mask and log-probability: 16 bytes."""
    rollout = config.rollout
    groups = (1 + rollout.alpha) * rollout.groups_per_batch + rollout.redundant_groups
    samples = int(groups) * (rollout.group_size + rollout.redundant_episodes)
    field = "rollout.alpha, rollout.groups_per_batch, rollout.group_size"
    return Need("sample", "host", samples, {"tokens": 16 * config.sampling.max_tokens}, field)


def _engine(config: Config, model: ModelShape) -> dict[str, int]:
    """The bytes of one device of an engine, by purpose."""
    generator = config.generator
    context = generator.max_model_len * _kv_bytes_per_token(config, model)
    return {
        "weights": model.parameters * _bytes(generator.dtype) // generator.tensor_parallel,
        "KV cache": (generator.kv_cache_bytes or context) // generator.tensor_parallel,
        "token table": 4 * generator.max_num_seqs * generator.max_model_len,
    }


def _learner(config: Config, model: ModelShape) -> dict[str, int]:
    """The bytes of one rank, by purpose; everything but activations is divided among the ranks."""
    learner = config.learner
    copies = 1 + config.algo.critic.enabled  # each with gradients and two moments
    frozen = bool(config.algo.kl.coef)

    number = _bytes(config.model.dtype)
    in_batch = config.batch_size * config.generator.max_model_len // learner.ranks
    tokens = min(max(learner.max_tokens_per_pack, config.generator.max_model_len), max(in_batch, 1))
    one_layer = _ACTIVATIONS * tokens * model.hidden * number
    boundaries = tokens * model.hidden * number * model.layers
    activations = boundaries + one_layer if learner.activation_checkpointing else model.layers * one_layer

    sharded = model.parameters * _MASTER // learner.ranks
    return {
        "weights": sharded * (copies + frozen),
        "gradients": sharded * copies,
        "optimizer": 2 * sharded * copies,
        "activations": activations,
        "logits": 3 * 4 * learner.logprob_chunk * model.vocabulary,
    }


def _kv_bytes_per_token(config: Config, model: ModelShape) -> int:
    return 2 * model.layers * model.kv_heads * model.head_dim * _bytes(config.generator.dtype)


def _bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _text(size: float) -> str:
    if size >= _GIB:
        return f"{size / _GIB:.1f} GiB"
    return f"{size / _MIB:.0f} MiB" if size >= _MIB else f"{size / 1024:.0f} KiB"
