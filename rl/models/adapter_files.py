"""Adapters in peft's files: `adapter_config.json` says what they are, `adapter_model.safetensors` has their matrices.

peft is not needed: what it writes with its defaults is read, and what is written here it reads. Whatever would make
another model of the same matrices is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl.config.lora import LoraOptions
from rl.models.loading import local_part, opened
from rl.models.lora import EXPERTS, LoraExperts, LoraLinear, Pair, adapted, targets, weights
from rl.models.protocol import whole

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HEAD = "base_model.model.lm_head.base_layer.weight"  # peft saves the base's own beside an adapter of the head
_WRAPPED_FIRST = "gate_up_proj"  # of the experts' parameters
_SAYS_NOTHING_ELSE = {
    *("base_model_name_or_path", "revision", "task_type", "peft_type", "peft_version", "auto_mapping"),
    *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_pattern", "init_lora_weights"),
    *("target_parameters", "inference_mode", "megatron_core", "qalora_group_size", "runtime_config", "loftq_config"),
    "eva_config",
}
"""Keys that change nothing of the plain sum of a weight and a product, or are looked at by themselves. All others have
to be unset: new versions of peft add kinds of adapters by new keys."""
_STARTS = (True, False, "gaussian", "orthogonal", "eva")  # ways to begin that leave the weights of the base as they are


def check_start(model: nn.Module, options: LoraOptions, folder: Path, path: str) -> None:
    """The adapters of `options.start` are some that `options` describes, beside `model`, which is in `folder` and which
    the user calls `path`. Raises ValueError."""
    assert options.start is not None
    start, field = Path(options.start), f"model.lora.start={options.start!r}"
    told = _told(start, field)
    for key, value in _strange(told).items():
        raise ValueError(f"{field}: its {_CONFIG} says {key}={value!r}, and only plain adapters can go on")

    theirs = f"r={told.get('r')} and lora_alpha={told.get('lora_alpha')}"
    if (told.get("r"), told.get("lora_alpha")) != (options.rank, options.alpha):
        ours = f"model.lora.rank={options.rank} and alpha={options.alpha:g}"
        raise ValueError(f"{field} has {theirs}, not {ours}; set them so")

    base = str(told.get("base_model_name_or_path"))
    if base != path and Path(base).resolve() != folder.resolve():
        raise ValueError(
            f"{field} belongs to {base!r}, and model.path is {path!r}: name that model, or correct "
            f"base_model_name_or_path in its {_CONFIG} if it is the same"
        )
    _check_tensors(model, options, start, field)


def _strange(told: Mapping[str, Any]) -> dict[str, Any]:
    """What is said beyond a plain sum."""
    found = {key: value for key, value in told.items() if key not in _SAYS_NOTHING_ELSE and value and value != "none"}
    for key, plain in (("peft_type", ("LORA",)), ("init_lora_weights", _STARTS)):
        if told.get(key, plain[0]) not in plain:
            found[key] = told[key]
    return found


def _told(start: Path, field: str) -> dict[str, Any]:
    try:
        told = json.loads((start / _CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{field} is no folder of adapters: {_CONFIG} cannot be read ({error})") from None
    if not isinstance(told, dict):
        raise ValueError(f"{field} is no folder of adapters: {_CONFIG} says nothing of one")
    if not (start / _WEIGHTS).is_file():
        raise ValueError(f"{field} has no {_WEIGHTS}, and nothing else is read")
    return told


def _check_tensors(model: nn.Module, options: LoraOptions, start: Path, field: str) -> None:
    """Each target has its two matrices, and nothing else has any."""
    wanted: dict[str, list[int]] = {}
    for name, layer in targets(model, options).items():
        for pair, weight in weights(layer).items():
            a, b = _in_files(name, pair)
            ranks = options.rank * math.prod(weight.shape[:-2])  # of all experts
            wanted |= {a: [ranks, weight.shape[-1]], b: [weight.shape[-2], ranks]}
    with opened(start / _WEIGHTS) as file:
        found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    found.pop(_HEAD, None)

    if missing := sorted(wanted.keys() - found.keys()):
        raise ValueError(f"{field} has no {missing[0]!r}, one of {len(missing)} that model.lora.targets needs")
    if more := sorted(found.keys() - wanted.keys()):
        raise ValueError(f"{field} has {more[0]!r}, one of {len(more)} that are beside no layer of model.lora.targets")
    if wrong := [name for name in wanted if found[name] != wanted[name]]:
        shapes = f"{found[wrong[0]]}, and the model needs {wanted[wrong[0]]}"
        raise ValueError(f"{field}: {wrong[0]!r} is of shape {shapes}: it belongs to another model")


@torch.no_grad()
def read_adapters(model: nn.Module, folder: Path) -> None:
    """This rank's rows of all adapters from the files in `folder`, which were checked. Raises ValueError."""
    with opened(folder / _WEIGHTS) as file:
        for name, layer in adapted(model).items():
            for pair in layer.pairs:
                for saved, last in zip(_in_files(name, pair), (pair.a, pair.b), strict=True):
                    parameter = getattr(layer, last)
                    rows, first = local_part(parameter)
                    whole_one = _from_file(file.get_tensor(saved), parameter.shape, is_b=last == pair.b)
                    rows.copy_(whole_one[first : first + len(rows)])


@torch.no_grad()
def adapter(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All adapters whole, by the names that peft gives them. All ranks go through it together."""
    for name, layer in adapted(model).items():
        for pair in layer.pairs:
            a, b = _in_files(name, pair)
            yield a, whole(getattr(layer, pair.a)).flatten(0, -2)
            yield b, _columns(whole(getattr(layer, pair.b)))


def peft_config(model: nn.Module, options: LoraOptions, base: str) -> dict[str, Any]:
    """What peft and vLLM ask of `adapter_config.json`; base: folder or name of the model that they belong to."""
    found = adapted(model).items()
    experts = {
        f"{EXPERTS}.{pair.weight}" for _, layer in found if isinstance(layer, LoraExperts) for pair in layer.pairs
    }
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": options.rank,
        "lora_alpha": int(options.alpha) if options.alpha.is_integer() else options.alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name, layer in found if isinstance(layer, LoraLinear)}),
        **({"target_parameters": sorted(experts, reverse=True)} if experts else {}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _in_files(layer: str, pair: Pair) -> tuple[str, str]:
    """The names of both matrices. Of a layer with two parameters peft wraps the one that it was told first again."""
    owner = f"base_model.model.{layer}" + (".base_layer" if pair.weight == _WRAPPED_FIRST else "")
    return f"{owner}.lora_A.weight", f"{owner}.lora_B.weight"


def _columns(b: Tensor) -> Tensor:
    """B as files have it: of experts (out, rank x experts), one after another within each rank."""
    return b.permute(1, 2, 0).flatten(1) if b.dim() == 3 else b


def _from_file(saved: Tensor, shape: torch.Size, *, is_b: bool) -> Tensor:
    """The inverse."""
    if is_b and len(shape) == 3:
        return saved.view(*shape[1:], shape[0]).permute(2, 0, 1)
    return saved.view(shape)
