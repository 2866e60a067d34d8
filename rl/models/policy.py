"""The policy: a causal language model and its log-probability head as one module, packed, optionally FSDP-sharded.

Model and head are one `nn.Module` because FSDP gathers parameters when a module is *called*: the head reads
`lm_head.weight` directly, so it must run inside the root's forward.

Packing holds only if the model gets positions that restart with each sample, no attention mask and
`use_cache=False`; anything else lets samples attend to each other without an error (tests/rl/learner/test_policy.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils.import_utils import is_flash_attn_2_available

from rl.config.schema import LearnerConfig
from rl.models import families, packed_attention
from rl.models.head import token_logprobs
from rl.models.loading import allocate, empty_model, local_part, read_weights
from rl.models.packed_attention import can_pack, pack_bounds, takes_bounds
from rl.models.shared_prompts import find_shared

DEFAULTS = LearnerConfig()
M = TypeVar("M", bound="PackedModel")


class PolicyOutput(NamedTuple):
    """A tuple, because FSDP finds the tensors whose backward it must prepare for in tuples, not in dataclasses."""

    logp: Tensor  # (T,) float32
    entropy: Tensor  # (T,) float32


class PackedModel(nn.Module):
    """A model of transformers that reads packs; `rl.learner.critic.Critic` is the other one."""

    model: Any  # a decoder, or a causal language model around one

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.autocast_dtype: torch.dtype | None = None  # compute dtype of an unsharded model; FSDP casts by itself
        self._takes_bounds = takes_bounds(model)
        self.shares_prompts = self.model.config._attn_implementation == packed_attention.NAME

    @property
    def decoder(self) -> Any:
        """The layers without a head."""
        return self.model.get_decoder()

    def contexts(self, token_ids: Tensor, position_ids: Tensor, targets: Tensor) -> Tensor:
        """(S, H): the state before each target, of several samples one after another, each blind to the others.

        token_ids, position_ids (T,) int64; targets (S,) int64: ascending places with a position above 0. A prompt that
        several samples share is computed once, where the attention can.
        """
        rows = targets - 1
        bounds: dict[str, Any] = {}
        shared = find_shared(token_ids, position_ids, targets) if self.shares_prompts else None
        if shared is not None:
            token_ids, position_ids = token_ids[shared.tokens], position_ids[shared.tokens]
            rows = shared.rows[rows]
            bounds = {"shared": shared}
        elif self._takes_bounds:
            bounds = pack_bounds(position_ids)

        output = self.decoder(token_ids[None], position_ids=position_ids[None], use_cache=False, **bounds)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden[rows]

    def autocast(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """In which forwards run."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=self.autocast_dtype)


class Policy(PackedModel):
    """`model` is a causal language model of transformers whose logits are `hidden @ lm_head.weight.T`, or so scaled."""

    def __init__(self, model: nn.Module, *, logprob_chunk: int = DEFAULTS.logprob_chunk) -> None:
        super().__init__(model)
        self.logprob_chunk = logprob_chunk
        self.logit_divisor = families.logit_divisor(self.model.config)
        head = self.model.get_output_embeddings()
        if head is None or getattr(head, "bias", None) is not None:
            raise ValueError(f"{type(model).__name__}: the logits must be a plain product, and its head has a bias")
        if not hasattr(self.decoder, "layers"):
            raise ValueError(f"{type(model).__name__}: its decoder has no `layers` that could be sharded one by one")

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        *,
        temperature: float = 1.0,
        select: Tensor | None = None,
        entropy_gradient: bool = False,
    ) -> PolicyOutput:
        """Log pi(token t | tokens of the same sample before t) and the entropy of that distribution, each (T,).

        token_ids (T,) int64 of several samples one after another; position_ids (T,) int64 restart at 0 with each.
        Both results are 0 at a sample's first token and wherever `select` (T,) bool is false: the head, the
        largest matrix of a small model, runs on selected positions only.
        """
        wanted = position_ids > 0 if select is None else select & (position_ids > 0)
        targets = wanted.nonzero()[:, 0]  # (S,)
        with self.autocast(token_ids.device.type):
            hidden = self.contexts(token_ids, position_ids, targets)  # (S, H)

        logp, entropy = token_logprobs(
            hidden,
            self.model.get_output_embeddings().weight,
            token_ids[targets],
            temperature=temperature * self.logit_divisor,
            chunk=self.logprob_chunk,
            entropy_gradient=entropy_gradient,
        )

        zeros = torch.zeros(len(token_ids), dtype=logp.dtype, device=logp.device)
        return PolicyOutput(zeros.index_copy(0, targets, logp), zeros.index_copy(0, targets, entropy))


class Placing(TypedDict, total=False):
    """How `shard_policy` places a model."""

    compute_dtype: torch.dtype
    activation_checkpointing: bool
    mesh: DeviceMesh | None
    device: str


def load_policy(
    folder: str | Path,
    *,
    logprob_chunk: int = DEFAULTS.logprob_chunk,
    attention: str | None = None,
    **placing: Unpack[Placing],
) -> Policy:
    """The model in `folder`, in float32 and ready to train. Raises ValueError for what it would get wrong."""
    return load_packed(folder, lambda model: Policy(model, logprob_chunk=logprob_chunk), attention, **placing)


def load_packed(
    folder: str | Path, wrap: Callable[[Any], M], attention: str | None = None, **placing: Unpack[Placing]
) -> M:
    """`wrap` of the causal language model in `folder`, placed by `shard_policy`; a rank reads its own rows only.

    attention: transformers' name; None is FlashAttention 2 on a GPU that has it, else `packed_attention.py`, or
    `sdpa` for a model with sliding windows.
    """
    made = wrap(_empty(folder, attention, placing.get("device", "cpu"))).train()
    shard_policy(made, **placing)
    read_weights(made.model, folder)
    return made


def check_trainable(folder: str | Path, *, untested: bool = False) -> None:
    """Raises ValueError, as `load_policy` would and for a family that is not tested, without reading any weights."""
    families.check_family(families.read_config(Path(folder)), untested=untested)
    model = Policy(_empty(folder, None, "cpu")).model
    families.check_layers(model)


def _empty(folder: str | Path, attention: str | None, device: str) -> Any:
    config = AutoConfig.from_pretrained(str(folder))
    if get_checkpoint_conversion_mapping(config.model_type):
        raise ValueError(f"{config.model_type}: {families.CONVERTED}")
    if attention is None and device == "cuda" and is_flash_attn_2_available():
        attention = "flash_attention_2"
    elif attention is None:
        attention = packed_attention.NAME if can_pack(config) else "sdpa"
    return empty_model(folder, attention)


def shard_policy(
    policy: M,
    *,
    compute_dtype: torch.dtype = torch.float32,
    activation_checkpointing: bool = False,
    mesh: DeviceMesh | None = None,
    device: str = "cpu",
) -> M:
    """Shard a policy or a critic in place over a one-dimensional mesh; without one only move it to the device.

    Master weights, gradients and their reduction stay float32; forward and backward run in `compute_dtype`.
    """
    if activation_checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    if mesh is None:
        policy.autocast_dtype = None if compute_dtype == torch.float32 else compute_dtype
        return allocate(policy, device)

    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in policy.decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # FSDP's default keeps the root's parameters gathered after a forward: a later one without gradients would
    # leave them so through the optimizer's step, and the next forward would see old embeddings.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    return allocate(policy, device)


def export_entries(policy: Policy, *, untie: bool = True) -> list[tuple[str, tuple[int, ...]]]:
    """(name, full shape) of every tensor of a checkpoint, in the names of the model's own files.

    untie: with tied embeddings `lm_head.weight` is exported too, as a copy, for engines that load them apart.
    """
    return [(name, tuple(parameter.shape)) for name, parameter in _exported(policy, untie)]


def local_rows(policy: Policy, *, untie: bool = True) -> Iterator[tuple[str, Tensor, int]]:
    """(name, rows, first row) of what this rank holds of each tensor of `export_entries`, without communication.

    rows (n, ...) float32 is a view of the master weights; n may be 0.
    """
    for name, parameter in _exported(policy, untie):
        yield name, *local_part(parameter)


def _exported(policy: Policy, untie: bool) -> Iterator[tuple[str, Any]]:
    parameters: Iterator[tuple[str, Any]] = policy.model.named_parameters()
    yield from parameters
    if untie and policy.tied:
        yield "lm_head.weight", policy.model.get_output_embeddings().weight
