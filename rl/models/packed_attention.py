"""Attention over a pack: one gather of keys and values, and segments of their own lengths (`rl.models.layout`).

On a GPU all segments are one call: `varlen` of torch, or FlashAttention's where it is asked for. Elsewhere segments of
equal shape are one call, so a pack costs what its samples cost. The `sdpa` of transformers gives a pack one mask of
(T, T), whose cost grows with the square.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.utils.import_utils import is_flash_attn_2_available

from rl.models.compiled import asked_once, left_alone
from rl.models.layout import Run, Spans
from rl.models.shared_rows import rows_of
from rl.models.team import Team

NAME = "packed"
Kernel = Literal["auto", "varlen", "flash", "sdpa"]
_OLDEST = (8, 0)
_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256  # of both kernels for GPUs
_KINDS = {"full_attention", "sliding_attention"}


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    segments: Spans | None = None,
    kernel: Kernel = "auto",
    team: Team | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query (1, heads, C, d), key and value (1, kv heads, C, d) of the C tokens of `segments`; (1, C, heads, d).

    team: ranks that have the C tokens together. Then all three, and the answer, are of this rank's tokens alone.

    sliding_window: tokens that each one sees, itself among them; None: all before it. Raises ValueError without
    segments, because samples would see each other, and for what this attention does not compute.
    """
    if segments is None or attention_mask is not None:
        raise ValueError(f"{NAME!r} attention needs the segments of a pack, and takes no mask")
    changed = [name for name in ("softcap", "s_aux") if others.get(name) is not None]
    changed += ["dropout"] if dropout else []
    changed += [] if getattr(module, "is_causal", True) else ["is_causal=False"]
    if changed:
        raise ValueError(f"{type(module).__name__}: {NAME!r} attention knows no {', '.join(changed)}")

    # Under autocast a norm of queries and keys answers in float32, which kernels for half precision refuse.
    q, k, v = (each.transpose(1, 2)[0].to(value.dtype) for each in (query, key, value))  # (C, heads, d)
    if team is not None:
        q, k, v = team.to_heads(q, k, v, segments.tokens)
    chosen = _kernel(kernel, v.device, v.dtype, v.shape[-1])
    if segments.keys is not None:
        k, v = rows_of(k, segments.keys), rows_of(v, segments.keys)
    found = _KERNELS[chosen](q, k, v, segments, scaling, sliding_window)  # (C, heads, d)
    return (found if team is None else team.to_tokens(found))[None], None


def _kernel(asked: Kernel, device: torch.device, dtype: torch.dtype, head: int) -> Kernel:
    """Raises ValueError for a kernel that was asked for by name and refuses heads of so many numbers, in this dtype."""
    refused = _refused(device, dtype, head)
    if asked == "auto":
        if not refused:
            return "varlen" if has_varlen() else "flash" if is_flash_attn_2_available() else "sdpa"
        return "sdpa"
    if asked not in get_args(Kernel):
        raise ValueError(f"attention={asked!r} is none of {', '.join(get_args(Kernel))}")
    if asked != "sdpa" and refused:
        raise ValueError(f"attention={asked!r} refuses {refused}: leave it at 'auto', or use 'sdpa'")
    return asked


def _refused(device: torch.device, dtype: torch.dtype, head: int) -> str:
    """What the kernels for GPUs refuse, or the empty string."""
    if device.type != "cuda":
        return f"the device {device.type!r}"
    if _capability(device) < _OLDEST:
        return "a GPU of before compute capability 8.0"
    if dtype not in _HALF:
        return f"the dtype {str(dtype).removeprefix('torch.')}"
    return f"heads of {head}" if head > _LARGEST_HEAD or head % 8 else ""


@asked_once
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _varlen_takes() -> frozenset[str]:
    """The names of what the kernel takes; nothing where this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(varlen_attn).parameters)


@asked_once
def has_varlen(taking: str = "query") -> bool:
    """Whether this torch has the kernel, and it takes what is called so."""
    return taking in _varlen_takes()


def _varlen(q: Tensor, k: Tensor, v: Tensor, segments: Spans, scaling: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scaling, "window_size": _before(window)}
    if has_varlen(taking="enable_gqa"):
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    bounds = (segments.query_bounds, segments.key_bounds, segments.longest_query, segments.longest_key)
    call: Any = varlen_attn  # answers in a tuple only where it is asked for more
    found: Tensor = call(q, k, v, *bounds, **options)
    return found


@left_alone
def _flash(q: Tensor, k: Tensor, v: Tensor, segments: Spans, scaling: float | None, window: int | None) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    bounds = (segments.query_bounds, segments.key_bounds, segments.longest_query, segments.longest_key)
    found: Tensor = flash_attn_varlen_func(
        q, k, v, *bounds, softmax_scale=scaling, causal=True, window_size=_before(window)
    )
    return found


def _before(window: int | None) -> tuple[int, int]:
    """Keys that a query sees before and after its own; both kernels let the last query see the last key."""
    return (-1 if window is None else window - 1, 0)


@left_alone  # its calls depend on the lengths in a pack
def _by_shape(q: Tensor, k: Tensor, v: Tensor, segments: Spans, scaling: float | None, window: int | None) -> Tensor:
    """A call for each run of segments; one split of each tensor, because a slice's backward writes all of it."""
    queries = [run.length * run.count for run in segments.runs]
    seen = [(run.context + run.length) * run.count for run in segments.runs]

    parts = []
    for run, *own in zip(segments.runs, q.split(queries), k.split(seen), v.split(seen), strict=True):
        of_run = [each.unflatten(0, (run.count, -1)).transpose(1, 2) for each in own]  # (count, heads, _, d)
        found = _of_run(run, of_run[0], of_run[1], of_run[2], segments, scaling, window)
        parts.append(found.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def _of_run(
    run: Run, q: Tensor, k: Tensor, v: Tensor, segments: Spans, scaling: float | None, window: int | None
) -> Tensor:
    """(count, heads, length, d). A run is causal or masked, whichever computes fewer products of queries and keys."""
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
    if window is not None and window < run.context + run.length:
        return scaled_dot_product_attention(q, k, v, attn_mask=_mask(run, q, segments, window), **options)

    if run.length <= run.context:
        return scaled_dot_product_attention(q, k, v, attn_mask=_mask(run, q, segments, None), **options)
    if run.context:
        q = pad(q, (0, 0, run.context, 0))
    return scaled_dot_product_attention(q, k, v, is_causal=True, **options)[:, :, run.context :]


def _mask(run: Run, q: Tensor, segments: Spans, window: int | None) -> Tensor:
    """(length, context + length) to be added to the scores; the same in all layers."""
    where = (run.context, run.length, window)
    if where not in segments.masks:
        shape = (run.length, run.context + run.length)
        seen = torch.ones(shape, dtype=torch.bool, device=q.device).tril(run.context)
        if window is not None:
            seen = seen.triu(run.context - window + 1)
        segments.masks[where] = torch.zeros(shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -torch.inf)
    return segments.masks[where]


_KERNELS: dict[str, Callable[..., Tensor]] = {"varlen": _varlen, "flash": _flash, "sdpa": _by_shape}


def check_layers(config: Any) -> None:
    """Raises ValueError for a model with layers that attend otherwise than to all before, or to a window of them."""
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS)
    if strange:
        raise ValueError(f"{config.model_type}: layers of the kind {', '.join(strange)} cannot read packs")


AttentionInterface.register(NAME, packed_attention)
