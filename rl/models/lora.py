"""Adapters of low rank beside linear layers that stand still (LoRA, https://arxiv.org/abs/2106.09685).

A layer that gets one keeps the names of its weight and its bias. Loading, sharding and the names of an export are so
those of the model itself. What leaves the learner is the sum of both, computed in float32: engines, channels and the
proof of arrival know nothing of adapters. Engines that do (`model.lora.serve=adapter`) get the adapters as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rl.config.lora import LoraOptions
from rl.config.schema import nearest
from rl.models.loading import local_part
from rl.models.protocol import Exported, Placement, whole

ADAPTER = ("lora_A", "lora_B")
"""The last parts of the names of an adapter's two matrices."""


class LoraLinear(nn.Module):
    """`x W' + b + scale (x A') B'`, of which A (rank, in) and B (out, rank) are trained."""

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
    def merged(self, part: Callable[[Tensor], Tensor]) -> Tensor:
        """`part` of the weight that does alone what both do, in float32. All ranks call it together.

        A bfloat16 weight cannot take it up: most of a small adapter would be rounded away.
        """
        a = whole(self.lora_A)
        return torch.addmm(part(self.weight).float(), part(self.lora_B), a, alpha=self.scale)


def add_adapters(model: Any, options: LoraOptions, dtype: torch.dtype) -> None:
    """Every parameter of `model`, a causal language model on the meta device, stands still in `dtype`; beside the
    layers that `options` names stand adapters in float32. Raises ValueError, as `targets` does."""
    chosen = targets(model, options)
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, layer in chosen.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, LoraLinear(layer, options))


def targets(model: Any, options: LoraOptions) -> dict[str, nn.Linear]:
    """The layers that get an adapter, by name. Raises ValueError for what the model has not, or not so large."""
    head = model.get_output_embeddings()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    known = sorted({name.rpartition(".")[2] for name in layers})
    family = model.config.model_type
    if isinstance(options.targets, str):
        chosen = {name: layer for name, layer in layers.items() if layer is not head and layer.out_features > 1}
    else:
        for target in options.targets:
            if target not in known:
                raise ValueError(f"model.lora.targets: {family} has no linear layer {target!r}{nearest(target, known)}")
        chosen = {name: layer for name, layer in layers.items() if name.rpartition(".")[2] in options.targets}

    if head in chosen.values() and head.weight is model.get_input_embeddings().weight:
        raise ValueError("model.lora.targets: the head is the embedding (tie_word_embeddings), so it gets no adapter")
    for name, layer in chosen.items():
        if options.rank > (least := min(layer.in_features, layer.out_features)):
            raise ValueError(f"model.lora.rank={options.rank}: {name} has rank {least} itself; lower it")
    return chosen


def adapted(model: nn.Module) -> dict[str, LoraLinear]:
    """The layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is part of an adapter."""
    return name.rpartition(".")[2] in ADAPTER


def waits_for(name: str) -> str:
    """The parameter without which this one has no gradient: an adapter's A has none while its B is zero."""
    owner, _, last = name.rpartition(".")
    return f"{owner}.{ADAPTER[1]}" if last == ADAPTER[0] else ""


@torch.no_grad()
def begin(model: nn.Module, options: LoraOptions) -> None:
    """First weights of all adapters, the same for any number of ranks: A as peft draws it, B zero, so that the model is
    the one without them."""
    random = torch.Generator().manual_seed(options.seed)
    for layer in adapted(model).values():
        bound = layer.lora_A.shape[1] ** -0.5
        drawn = torch.empty(layer.lora_A.shape).uniform_(-bound, bound, generator=random)
        rows, first = local_part(layer.lora_A)
        rows.copy_(drawn[first : first + len(rows)])
        local_part(layer.lora_B)[0].zero_()


def rows(model: nn.Module) -> Iterator[Exported]:
    """This rank's rows of all adapters, as they are: `LAYER.lora_A` and `LAYER.lora_B`."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            own, first = local_part(parameter)
            yield Exported(name, own, Placement(tuple(parameter.shape), first))


@torch.no_grad()
def adapter(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All adapters whole, by the names that peft gives them. All ranks go through it together."""
    for name, layer in adapted(model).items():
        for last in ADAPTER:
            yield f"base_model.model.{name}.{last}.weight", whole(getattr(layer, last))


def peft_config(model: nn.Module, options: LoraOptions, base: str) -> dict[str, Any]:
    """What peft and vLLM ask of `adapter_config.json`; base: folder or name of the model that they belong to."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": int(options.alpha) if options.alpha.is_integer() else options.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapted(model)}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


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
