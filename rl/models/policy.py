"""Policy and critic: a causal language model with its log-probability head, or a decoder with a value head.

Each is one module, packed and optionally FSDP-sharded.

Model and head are one `nn.Module` because FSDP gathers parameters when a module is *called*: the head reads
`lm_head.weight` directly, so it must run inside the root's forward.

Packing holds only if the model gets positions that restart with each sequence, no attention mask and
`use_cache=False`; anything else lets samples attend to each other without an error (tests/rl/models/test_policy.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from transformers import AutoConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from rl.config.lora import LoraOptions
from rl.models import families, lora
from rl.models.adapter_files import check_start, read_adapters
from rl.models.casts import compute_in
from rl.models.compiled import compile_layers
from rl.models.head import token_logprobs
from rl.models.layout import Layout
from rl.models.loading import allocate, empty_model, is_told, local_part, read_weights, saved_buffers
from rl.models.naming import in_files
from rl.models.packed_attention import NAME, check_layers
from rl.models.packing import Pack
from rl.models.protocol import Exported, ModelOptions, Placement, PolicyOutput, holding, local, whole
from rl.models.routers import Routers
from rl.models.shape import logprob_chunk
from rl.models.shared_rows import rows_of
from rl.wire.columns import ROUTED_EXPERTS

M = TypeVar("M", bound="PackedModel")


class PackedModel(nn.Module):
    """A model of transformers that reads packs, with what policy and critic have in common."""

    model: Any  # a decoder, or a causal language model around one
    families: Iterable[str] = families.FAMILIES
    reads: Collection[str] = ()

    def __init__(self, model: nn.Module, options: ModelOptions = ModelOptions()) -> None:
        """model: its weights may not be there yet."""
        super().__init__()
        self.model = model
        self.routers = Routers(self.decoder)
        if options.router_replay and len(self.routers):
            self.reads = (ROUTED_EXPERTS,)
        self.mesh: DeviceMesh | None = None
        self.team = options.team
        self._kernel = options.attention
        check_layers(self.model.config)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        mesh: DeviceMesh | None = None,
        device: str = "cpu",
        options: ModelOptions = ModelOptions(),
    ) -> Self:
        """The model in `folder`, placed by `shard_policy`; a rank reads its own rows only.

        Raises ValueError for a family with a known fault; whether it has been tested was asked before anything started.
        """
        told = families.read_config(Path(folder))
        families.check_family(told, untested=True)
        if options.team is not None:
            families.check_team(told, options.team.size)
        model = _empty(folder)
        families.check_layers(model)

        if options.lora is not None:
            lora.add_adapters(model, options.lora, options.dtype)
        made = cls(model, options).train()
        shard_policy(made, options, mesh=mesh, device=device)
        read_weights(made.model, folder, lora.is_adapter)
        if options.lora is not None and options.lora.start is not None:
            read_adapters(made.model, Path(options.lora.start))
        elif options.lora is not None:
            lora.begin(made.model, options.lora)
        return made

    @property
    def decoder(self) -> Any:
        """The layers without a head."""
        return self.model.get_decoder()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def vocab_size(self) -> int:
        size: int = self.model.config.vocab_size
        return size

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, each) for name, each in self.named_parameters() if each.requires_grad)

    def export(self, *, untie: bool = True) -> Iterator[Exported]:
        sums = lora.sums(self.model)
        for name, parameter in self._exported(untie):
            tensor, first = local_part(parameter)
            if name in sums:
                tensor = sums[name](local)
            if not is_told(parameter, self.mesh):
                tensor, first = tensor[:0], parameter.shape[0]
            yield from in_files(self._family, name, tensor, Placement(tuple(parameter.shape), first))

    def adapters(self) -> Iterator[Exported]:
        return lora.rows(self.model, self.mesh)

    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        sums = lora.sums(self.model)
        parameters = dict(self._exported(untie=True))
        owners: dict[str, str] = {}
        for owner, each in parameters.items():
            parts = in_files(self._family, owner, local_part(each)[0][:0], Placement(tuple(each.shape)))
            owners |= dict.fromkeys((part.name for part in parts), owner)

        for owner, wanted in groupby(names, owners.__getitem__):  # the experts of a layer are gathered together
            full = sums[owner](whole) if owner in sums else whole(parameters[owner].detach())
            parts = in_files(self._family, owner, full, Placement(tuple(full.shape)))
            found = {part.name: part.tensor for part in parts}
            yield from ((name, found[name]) for name in wanted)

    @property
    def _family(self) -> str:
        family: str = self.model.config.model_type
        return family

    def _exported(self, untie: bool) -> Iterator[tuple[str, Tensor]]:
        """Parameters by the names of the model's own files."""
        yield from ((name, each) for name, each in self.model.named_parameters() if not lora.is_adapter(name))
        yield from saved_buffers(self.model)

    def layout_of(self, pack: Pack) -> Layout:
        """What this rank computes of the pack."""
        layout = pack.laid_out((0, 1) if self.team is None else self.team.part).layout
        assert layout is not None
        return layout

    def contexts(self, pack: Pack, layout: Layout) -> Tensor:
        """(S, H): the state before each target, of sequences that are blind to each other."""
        together: dict[str, Any] = {} if self.team is None else {"team": self.team}

        token_ids = pack.token_ids.index_select(0, layout.tokens)
        position_ids = pack.position_ids.index_select(0, layout.tokens)

        output = self.decoder(
            token_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            segments=layout.segments,
            kernel=self._kernel,
            **together,
            **self._routing(pack, layout),
        )
        return rows_of(output.last_hidden_state[0], layout.rows)

    def _routing(self, pack: Pack, layout: Layout) -> dict[str, Tensor]:
        """(C, layers, k) of each token that is computed: an entry stands at the token that its position predicts."""
        if not self.reads or ROUTED_EXPERTS not in pack.columns:
            return {}
        after = (layout.tokens + 1).clamp(max=pack.tokens - 1)
        return {"routing": pack.columns[ROUTED_EXPERTS].index_select(0, after)}

    def _at_targets(self, values: Tensor, pack: Pack, layout: Layout) -> Tensor:
        """(T,) with these values (S,) at the layout's targets, with those of others of the team, and 0 elsewhere."""
        found = values.new_zeros(pack.tokens).index_copy(0, layout.targets, values)
        return found if self.team is None else self.team.joined(found)


class Policy(PackedModel):
    """`model` is a causal language model of transformers whose logits are `hidden @ lm_head.weight.T`, or so scaled."""

    def __init__(self, model: nn.Module, options: ModelOptions = ModelOptions()) -> None:
        super().__init__(model, options)
        self._chunk = options.logprob_chunk
        self._compile = options.compile
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

    def forward(self, pack: Pack, *, temperature: float = 1.0, entropy_gradient: bool = False) -> PolicyOutput:
        """See `rl.models.protocol`. The head, the largest matrix of a small model, runs on targets only."""
        layout = self.layout_of(pack)
        self.routers.watch(layout.rows)
        hidden = self.contexts(pack, layout)  # (S, H)
        routing = self.routers.seen()

        found = token_logprobs(
            *lora.head_product(hidden, self.model.get_output_embeddings()),
            pack.token_ids.index_select(0, layout.targets),
            temperature=temperature * self.logit_divisor,
            chunk=logprob_chunk(self._chunk, self.vocab_size, self.device.type),
            entropy_gradient=entropy_gradient,
            compile=self._compile,
        )
        logp, entropy = (self._at_targets(values, pack, layout) for values in found)
        return PolicyOutput(logp, entropy, routing)

    def _exported(self, untie: bool) -> Iterator[tuple[str, Tensor]]:
        yield from super()._exported(untie)
        if untie and self.tied:
            yield "lm_head.weight", self.model.get_output_embeddings().weight


class Base:
    """The model that a policy with adapters began as, at the cost of a forward: it without them or, where it began with
    those of `model.lora.start`, with these."""

    def __init__(self, policy: Policy, *, keep: bool = False) -> None:
        """keep: its adapters as they are now; else none."""
        self._policy = policy
        self._begun = [local(each).clone() for _, each in policy.trainable()] if keep else []

    @property
    def device(self) -> torch.device:
        return self._policy.device

    def export(self, *, untie: bool = True) -> Iterator[Exported]:
        """Its parts, where the policy is just now: the model without adapters, and those that it began with."""
        with lora.switched_off(self._policy.model):
            parts = list(self._policy.export(untie=untie))
        begun = zip(self._policy.adapters(), self._begun, strict=False)  # none, or all of them
        return iter([*parts, *(each._replace(tensor=rows.to(self.device)) for each, rows in begun)])

    def __call__(self, pack: Pack, *, temperature: float = 1.0, entropy_gradient: bool = False) -> PolicyOutput:
        """See `rl.models.protocol`; without a gradient."""
        with torch.no_grad(), self._as_it_began():
            output: PolicyOutput = self._policy(pack, temperature=temperature, entropy_gradient=entropy_gradient)
            return output

    def _as_it_began(self) -> contextlib.AbstractContextManager[None]:
        """Not between a forward and its backward."""
        return holding(self._policy, self._begun) if self._begun else lora.switched_off(self._policy.model)


def check_trainable(
    folder: str | Path, *, untested: bool = False, options: LoraOptions | None = None, path: str = ""
) -> None:
    """Raises ValueError, as `load` would and for a family that is not tested, without reading any weights.

    path: what the user calls the model of `options`.
    """
    families.check_family(families.read_config(Path(folder)), untested=untested)
    model = Policy(_empty(folder)).model
    families.check_layers(model)
    if options is not None:
        lora.targets(model, options)
    if options is not None and options.start is not None:
        check_start(model, options, Path(folder), path)


def _empty(folder: str | Path) -> Any:
    config = AutoConfig.from_pretrained(str(folder))
    family = families.FAMILIES.get(config.model_type)
    if get_checkpoint_conversion_mapping(config.model_type) and not (family and family.routing):
        raise ValueError(f"{config.model_type}: {families.CONVERTED}")
    return empty_model(folder, NAME)


def shard_policy(
    policy: M, options: ModelOptions = ModelOptions(), *, mesh: DeviceMesh | None = None, device: str = "cpu"
) -> M:
    """Shard a policy or a critic in place over a mesh; without one only move it to the device.

    Experts are gathered apart from their layer. Of a mesh of two dimensions the first one has copies. What is trained
    and its gradients stay float32, forward and backward run in `options.dtype`, and ranks add up their gradients in
    `options.reduce_dtype`.
    """
    policy.mesh = mesh
    if options.compile:  # before sharding, whose hooks stay around what is compiled
        compile_layers(policy.decoder, policy.routers.blocks())
    if options.activation_checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    if mesh is None:
        if options.dtype != torch.float32:
            compute_in(policy, policy.decoder.layers, options.dtype)
        return allocate(policy, device)

    precision = MixedPrecisionPolicy(param_dtype=options.dtype, reduce_dtype=options.reduce_dtype)
    as_given = replace(precision, cast_forward_inputs=False)  # some routers give weights in float32
    for layer in policy.decoder.layers:
        for experts in expert_stacks(layer):
            fully_shard(experts, mesh=mesh, mp_policy=as_given)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # FSDP's default keeps the root's parameters gathered after a forward: a later one without gradients would
    # leave them so through the optimizer's step, and the next forward would see old embeddings.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    return allocate(policy, device)


def expert_stacks(layer: nn.Module) -> list[nn.Module]:
    """The modules of a layer that hold matrices of all its experts, which are nearly all of it."""
    own = {module: list(module.parameters(recurse=False)) for module in layer.modules()}
    return [module for module, held in own.items() if held and all(each.dim() == 3 for each in held)]


class Critic(PackedModel):
    """The critic of PPO: a decoder of its own with a value head, packed and FSDP-sharded like the policy.

    V_t is the value of the context before generated token t, so it stands at t like the token's log-probability. The
    head starts at zero: the first advantages are then the rewards themselves.
    """

    def __init__(self, model: nn.Module, options: ModelOptions = ModelOptions()) -> None:
        """model: a causal language model, whose head is not used."""
        super().__init__(Policy(model).decoder, options)
        self.head = nn.Linear(self.model.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def _exported(self, untie: bool) -> Iterator[tuple[str, Tensor]]:
        return iter(self.named_parameters())

    def forward(self, pack: Pack) -> Tensor:
        """See `rl.models.protocol`."""
        layout = self.layout_of(pack)
        # In float32: values that differ by less than 1 % of their level would be equal in bfloat16.
        head = self.head.weight.float(), self.head.bias.float()
        values = functional.linear(self.contexts(pack, layout).float(), *head)[:, 0]  # (S,)
        return self._at_targets(values, pack, layout)
