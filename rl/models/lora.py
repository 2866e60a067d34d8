"""Adapters of low rank beside linear layers and experts that stand still (LoRA, https://arxiv.org/abs/2106.09685).

A layer that gets one keeps the names of its own parameters. Loading, sharding and the names of an export are so those
of the model itself. What leaves the learner is the sum of both, computed in float32: engines, channels and the proof of
arrival know nothing of adapters. Engines that do (`model.lora.serve=adapter`) get the adapters as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.nn.functional import linear

from rl.config.lora import LoraOptions
from rl.config.schema import nearest
from rl.models.loading import is_told, local_part
from rl.models.protocol import Exported, Placement, whole

ADAPTER = ("lora_A", "lora_B")
"""How the names of an adapter's two matrices end."""
EXPERTS = "experts"
"""The target that stands for all matrices of all experts of a layer; transformers keeps them as parameters."""


class Pair(NamedTuple):
    """Names, within a layer, of a weight and of the matrices of the adapter beside it."""

    weight: str
    a: str
    b: str


class LoraLinear(nn.Module):
    """`x W' + b + scale (x A') B'`, of which A (rank, in) and B (out, rank) are trained."""

    pairs = (Pair("weight", *ADAPTER),)

    def __init__(self, layer: nn.Linear, options: LoraOptions) -> None:
        """The layer's own parameters, and an adapter on the meta device."""
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        self.lora_A = nn.Parameter(torch.empty(options.rank, layer.in_features, device="meta"))
        self.lora_B = nn.Parameter(torch.empty(layer.out_features, options.rank, device="meta"))
        self.scale = options.scale
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        known = linear(x, self.weight, self.bias)
        return known + linear(linear(x, self.lora_A), self.lora_B) * self.scale if self.active else known

    @torch.no_grad()
    def merged(self, pair: Pair, part: Callable[[Tensor], Tensor]) -> Tensor:
        """`part` of the weight that does alone what both do, in float32. All ranks call it together.

        A bfloat16 weight cannot take it up: most of a small adapter would be rounded away.
        """
        a = whole(self.lora_A)
        return torch.addmm(part(self.weight).float(), part(self.lora_B), a, alpha=self.scale)


class LoraExperts(nn.Module):
    """All experts of a layer, with `W + scale B A` in the place of each weight W (experts, out, in).

    How tokens reach their experts is the model's own code. It multiplies with the sums, which are made anew in each
    forward: a sample passes nearly all experts of a large batch. Sums are in the dtype of the forward, as a whole model
    that is trained computes with its weights, so a step that this rounds away still has its gradient.
    """

    _experts: nn.Module

    def __init__(self, experts: nn.Module, options: LoraOptions) -> None:
        """The layer's own parameters, and adapters on the meta device."""
        super().__init__()
        self.__dict__["_experts"] = experts  # it is no child: what it had as parameters is this module's now
        self.pairs = tuple(weights(experts))
        for pair, weight in weights(experts).items():
            count, wide, deep = weight.shape
            setattr(self, pair.weight, weight)
            setattr(self, pair.a, nn.Parameter(torch.empty(count, options.rank, deep, device="meta")))
            setattr(self, pair.b, nn.Parameter(torch.empty(count, wide, options.rank, device="meta")))
        self.scale = options.scale
        self.active = True

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = functional_call(
            self._experts, {pair.weight: self._sum(pair) for pair in self.pairs}, args, kwargs
        )
        return found

    def _sum(self, pair: Pair) -> Tensor:
        weight: Tensor = getattr(self, pair.weight)
        if not self.active:
            return weight
        a, b = (getattr(self, name).to(weight.dtype) for name in (pair.a, pair.b))
        return torch.baddbmm(weight, b, a, alpha=self.scale)

    @torch.no_grad()
    def merged(self, pair: Pair, part: Callable[[Tensor], Tensor]) -> Tensor:
        """As `LoraLinear.merged`. A rank holds the adapters of its own experts, and needs no others."""
        weight, a, b = (part(getattr(self, name)).float() for name in pair)
        return torch.baddbmm(weight, b, a, alpha=self.scale)


Adapted = LoraLinear | LoraExperts


def add_adapters(model: Any, options: LoraOptions, dtype: torch.dtype) -> None:
    """Every parameter of `model`, a causal language model on the meta device, stands still in `dtype`; beside the
    layers that `options` names stand adapters in float32. Raises ValueError, as `targets` does."""
    chosen = targets(model, options)
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, layer in chosen.items():
        owner, _, last = name.rpartition(".")
        made = LoraLinear(layer, options) if isinstance(layer, nn.Linear) else LoraExperts(layer, options)
        setattr(model.get_submodule(owner), last, made)


def targets(model: Any, options: LoraOptions) -> Mapping[str, nn.Module]:
    """The layers that get an adapter, by name. Raises ValueError for what the model has not, or not so large."""
    head = model.get_output_embeddings()
    layers = {name: module for name, module in model.named_modules() if weights(module)}
    known = sorted({name.rpartition(".")[2] for name in layers})
    family = model.config.model_type
    if isinstance(options.targets, str):
        plain = {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
        chosen = {name: layer for name, layer in plain.items() if layer is not head and layer.out_features > 1}
    else:
        for target in options.targets:
            if target not in known:
                raise ValueError(f"model.lora.targets: {family} has no linear layer {target!r}{nearest(target, known)}")
        chosen = {name: layer for name, layer in layers.items() if name.rpartition(".")[2] in options.targets}

    if head in chosen.values() and head.weight is model.get_input_embeddings().weight:
        raise ValueError("model.lora.targets: the head is the embedding (tie_word_embeddings), so it gets no adapter")
    for name, layer in chosen.items():
        if options.rank > (least := min(min(weight.shape[-2:]) for weight in weights(layer).values())):
            raise ValueError(f"model.lora.rank={options.rank}: {name} has rank {least} itself; lower it")
    return chosen


def weights(module: nn.Module) -> Mapping[Pair, Tensor]:
    """What adapters can stand beside, each with its names: the weight of a linear layer, or those of all experts of
    one; nothing where it is neither."""
    if isinstance(module, nn.Linear):
        return {Pair("weight", *ADAPTER): module.weight}
    own = dict(module.named_parameters(recurse=False))
    if not own or any(each.dim() != 3 for each in own.values()):
        return {}
    return {Pair(name, *(f"{name}_{last}" for last in ADAPTER)): weight for name, weight in own.items()}


def adapted(model: nn.Module) -> dict[str, Adapted]:
    """The layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def adapters(model: nn.Module) -> Iterator[tuple[Adapted, Pair]]:
    """Every adapter, with the layer that it stands in."""
    return ((layer, pair) for layer in adapted(model).values() for pair in layer.pairs)


def sums(model: nn.Module) -> dict[str, Callable[[Callable[[Tensor], Tensor]], Tensor]]:
    """`merged` of the weights whose adapters count at the moment, by the name of the weight."""
    active = [(name, layer) for name, layer in adapted(model).items() if layer.active]
    return {f"{name}.{pair.weight}": partial(layer.merged, pair) for name, layer in active for pair in layer.pairs}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is part of an adapter."""
    return name.endswith(ADAPTER)


def waits_for(name: str) -> str:
    """The parameter without which this one has no gradient: an adapter's A has none while its B is zero."""
    a, b = ADAPTER
    return name.removesuffix(a) + b if name.endswith(a) else ""


@torch.no_grad()
def begin(model: nn.Module, options: LoraOptions) -> None:
    """First weights of all adapters, the same for any number of ranks: A as peft draws it, B zero, so that the model is
    the one without them."""
    random = torch.Generator().manual_seed(options.seed)
    for layer, pair in adapters(model):
        a = getattr(layer, pair.a)
        bound = a.shape[-1] ** -0.5
        drawn = torch.empty(a.shape).uniform_(-bound, bound, generator=random)
        rows, first = local_part(a)
        rows.copy_(drawn[first : first + len(rows)])
        local_part(getattr(layer, pair.b))[0].zero_()


def rows(model: nn.Module, mesh: DeviceMesh | None) -> Iterator[Exported]:
    """This rank's rows of all adapters, `LAYER.lora_A` and `LAYER.lora_B`; of several copies the first tells."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            own, first = local_part(parameter)
            if not is_told(parameter, mesh):
                own, first = own[:0], parameter.shape[0]
            yield Exported(name, own, Placement(tuple(parameter.shape), first))


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """The model as if it had no adapters; not between a forward and its backward."""
    layers = adapted(model).values()
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.active = True


def head_product(hidden: Tensor, head: Any) -> tuple[Tensor, Tensor]:
    """States and matrix whose product are the logits of a head; with an adapter both are wider by its rank."""
    if not (isinstance(head, LoraLinear) and head.active):
        return hidden, head.weight
    inner = linear(hidden.to(head.lora_A.dtype), head.lora_A) * head.scale
    return torch.cat([hidden, inner], -1), torch.cat([head.weight, head.lora_B], -1)
