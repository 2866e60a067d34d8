"""Reading a model from its files by parts: every rank allocates its own rows, and reads no others.

A model is built with its parameters on the meta device, which takes no memory, and its buffers on the CPU, where the
model's own code computes them. It is sharded so; then `allocate` gives the parameters memory, and `read_weights` copies
into each the rows that this rank holds, cast to float32 on the way. `to_empty`, torch's own way from the meta device,
would leave every rotary frequency as garbage.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM

from rl.models.naming import in_files
from rl.models.protocol import Exported, Placement

M = TypeVar("M", bound=nn.Module)

_CHUNK_BYTES = 64 << 20  # of a file's rows at a time, so that a large embedding needs no second place


def empty_model(folder: str | Path, attention: str | None = None) -> Any:
    """The causal language model of `folder` without weights or dropout: parameters on the meta device, in float32.

    attention: transformers' name of an implementation; None is its default.
    The dtype is given to the constructor: `.to(dtype)` afterwards would also cast the rotary `inv_freq`.
    """
    config = AutoConfig.from_pretrained(str(folder))
    _without_dropout(config)
    options = {"attn_implementation": attention} if attention else {}
    hook = register_module_parameter_registration_hook(cast(Any, _on_meta))  # torch's type forbids an answer
    try:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    finally:
        hook.remove()

    for module in model.modules():
        _without_dropout(module)
        if isinstance(module, _DropoutNd):
            module.p = 0.0
    return model


def allocate(module: M, device: str | torch.device) -> M:
    """Memory on `device` for the parameters that are on the meta device; everything else moves there as it is.

    A parameter stays the same object, so that tied ones stay tied.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        whole: Any = module
        whole._apply(lambda each: torch.empty_like(each, device=device) if each.is_meta else each.to(device))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    return module


def copied(module: M, device: str | torch.device, dtype: torch.dtype | None = None) -> M:
    """Copies on `device` in the place of all parameters, in `dtype` or their own; buffers move there as they are.

    Who holds what a parameter was before has it alone afterwards. Compiled code may know of a parameter, which then
    cannot be swapped with another one: it stays the same and gets other data.
    """
    done: set[int] = set()  # torch asks once for each name, of tied ones twice

    def each_copied(each: Tensor) -> Tensor:
        if not isinstance(each, nn.Parameter) or id(each) in done:
            return each.to(device)
        done.add(id(each))
        return copy_of(each, device, dtype)

    whole: Any = module
    whole._apply(each_copied)
    return module


def copy_of(tensor: Tensor, device: str | torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on `device` with the same values, sharded alike.

    Between a GPU and locked pages of the host the copy is only begun. A sharded tensor is on the host at once, because
    FSDP may read it there.
    """
    locked = tensor.is_cuda and torch.device(device).type == "cpu"
    made = torch.empty_like(tensor, device=device, dtype=dtype or tensor.dtype, pin_memory=locked)
    own, rows = (part.to_local() if isinstance(part, DTensor) else part for part in (made, tensor.detach()))
    begun = rows.is_pinned() or (locked and not isinstance(tensor, DTensor))
    own.copy_(rows, non_blocking=begun)
    return made


@torch.no_grad()
def read_weights(model: Any, folder: str | Path, absent: Callable[[str], bool] = lambda name: False) -> None:
    """Fill the parameters and persistent buffers of `model`, a model of transformers or its decoder, from `folder`.

    absent: whether a tensor of this name is none of the files'.
    Raises ValueError where the files lack a tensor, or have it in another shape.
    """
    files = weight_files(Path(folder))
    wanted: dict[Path, list[Exported]] = defaultdict(list)
    for names, tensor in _saved_tensors(model):
        if absent(names[0]):
            continue

        rows, first = local_part(tensor)
        place = Placement(tuple(tensor.shape), first)
        for same in zip(*(in_files(model.config.model_type, name, rows, place) for name in names), strict=True):
            name = _name_in_files([each.name for each in same], model.base_model_prefix, files)
            if name is None:
                needs = f"has no tensor {same[0].name!r}, which its {type(model).__name__} needs"
                raise ValueError(f"{str(folder)!r} {needs}")
            wanted[files[name]].append(same[0]._replace(name=name))

    for path, tensors in wanted.items():  # a file's pages count as ours while it is open
        with opened(path) as file:
            for name, rows, (shape, first) in tensors:
                saved = file.get_slice(name)
                if tuple(saved.get_shape()) != shape:
                    shapes = f"{tuple(saved.get_shape())} in {path.name}, the model has {shape}"
                    raise ValueError(f"{name} in {str(folder)!r} is of shape {shapes}")
                _copy_rows(saved, rows, first)


def local_part(parameter: Tensor) -> tuple[Tensor, int]:
    """The rows that this rank holds, a view of them, and the number of the first; there may be none."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), 0
    *copies, sharded = parameter.placements
    assert sharded == Shard(0) and all(each.is_replicate() for each in copies), f"placed as {parameter.placements}"
    mesh = parameter.device_mesh
    per_rank = -(-parameter.shape[0] // mesh.size(-1))
    first = min(mesh.get_local_rank(mesh.ndim - 1) * per_rank, parameter.shape[0])
    return parameter.to_local().detach(), first


def is_told(parameter: Tensor, mesh: DeviceMesh | None = None) -> bool:
    """Whether this rank tells others what it holds of a parameter: of several copies the first does.

    mesh: of the model, of which a tensor may not be sharded; then rank 0 tells.
    """
    if isinstance(parameter, DTensor):
        return not any((parameter.device_mesh.get_coordinate() or [])[:-1])
    return mesh is None or not any(mesh.get_coordinate() or [])


def weight_files(folder: Path) -> dict[str, Path]:
    """The safetensors file of each tensor of a checkpoint, as transformers chooses them.

    Raises ValueError where there is none: pickled weights run code when they are read, so they are not.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not whole.exists() and index.exists():
        listed = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        if missing := sorted({path.name for path in listed.values() if not path.exists()}):
            raise ValueError(f"{str(folder)!r} lacks {', '.join(missing)}, which {index.name} names; fetch it again")
        return listed

    found: dict[str, Path] = {}
    for path in [whole] if whole.exists() else sorted(folder.glob("*.safetensors")):
        with opened(path) as file:
            found |= dict.fromkeys(file.keys(), path)
    if not found:
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        fix = "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder) writes one"
        raise ValueError(
            f"no safetensors file in {str(folder)!r}" + (f", and {pickled[0]} is not read; {fix}" if pickled else "")
        )
    return found


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A file of weights. Raises ValueError that names it where it was cut short or is no such file."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path.name} in {str(path.parent)!r} cannot be read ({error}); fetch it again") from None


def exported_elements(files: Mapping[str, Path]) -> int:
    """The number of elements of all tensors of `weight_files`, and of the head that engines of tied models get."""
    sizes: dict[str, int] = {}
    for path in sorted({*files.values()}):
        with opened(path) as file:
            sizes |= {name: math.prod(file.get_slice(name).get_shape()) for name in files if files[name] == path}
    sizes.setdefault("lm_head.weight", sizes.get("model.embed_tokens.weight", 0))
    return sum(sizes.values())


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds beside parameters, such as the bias by which routers keep their load even."""
    for owner, module in model.named_modules():
        for name, buffer in module.named_buffers(owner, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _on_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
    """The parameter on the meta device, or None, which keeps it: a parameter that two modules share must stay one."""
    return None if parameter.is_meta else nn.Parameter(parameter.to("meta"), parameter.requires_grad)


def _without_dropout(owner: Any) -> None:
    """Set each probability of `owner`, a configuration or a module, to zero.

    Families give them names of their own: `attention_dropout`, `resid_pdrop`, `layerdrop`. Checkpointed activations
    need the mode of training, in which any of them would act.
    """
    for name, value in vars(owner).items():
        if "drop" in name and isinstance(value, float):
            setattr(owner, name, 0.0)


def _saved_tensors(model: nn.Module) -> Iterator[tuple[list[str], Tensor]]:
    """What a checkpoint holds, each tensor once, with all names that it has."""
    named: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), ([], tensor))[0].append(name)
    yield from named.values()


def _name_in_files(names: list[str], prefix: str, files: dict[str, Path]) -> str | None:
    """A decoder's names lack the prefix that a whole model's have; either may have been saved."""
    choices = [each for name in names for each in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))]
    return next((choice for choice in choices if choice in files), None)


def _copy_rows(saved: Any, rows: Tensor, first: int) -> None:
    """`saved`: a slice of safetensors. The cast happens where the rows are: a host has few threads for it."""
    if not rows.numel():
        return
    if not rows.dim():
        rows.copy_(saved[...])
        return

    step = max(1, _CHUNK_BYTES // (rows[0].numel() * rows.element_size()))
    for begin in range(0, len(rows), step):
        part = rows[begin : begin + step]
        part.copy_(saved[first + begin : first + begin + len(part)].to(part.device))
