"""Attention over a pack, sample by sample, for machines without FlashAttention.

transformers' `sdpa` gives a pack one mask of (T, T): its cost grows with the square of the pack. Here each run of
samples of equal length is a causal call of its own, so a pack costs what its samples cost. `make_packs` puts equal
lengths side by side. Where samples share prompts (`shared_prompts`), each prompt is computed once, and its keys and
values are given to all of its answers.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rl.models.shared_prompts import SharedPrompts

NAME = "packed_sdpa"


def packed_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    shared: SharedPrompts | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """query (1, heads, T, d), key and value (1, kv heads, T, d); `cu_seq_lens_q` (samples + 1,): where samples begin.

    shared: instead of the bounds, where the T tokens are those of a pack with each prompt once.
    Returns (1, T, heads, d). Raises ValueError without either: samples would see each other.
    """
    if (cu_seq_lens_q is None) == (shared is None) or attention_mask is not None:
        raise ValueError(f"{NAME} needs the bounds of the samples (cu_seq_lens_q) or their prompts, and takes no mask")

    if shared is not None:
        whole, answers = shared.whole, shared.answers
    else:
        assert cu_seq_lens_q is not None
        lengths = cu_seq_lens_q.diff().tolist()
        whole, answers = [(length, len(list(equal))) for length, equal in groupby(lengths)], []

    # One split of each tensor: a slice for each sample would let its backward write a tensor of the whole pack.
    sizes = [length * count for length, count in whole] + [each.length * each.count for each in answers]
    states = [each.transpose(1, 2)[0] for each in (query, key, value)]  # (tokens, heads, d)
    runs = list(zip(*(each.split(sizes) for each in states), strict=True))
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}

    parts = []
    for (length, count), run in zip(whole, runs, strict=False):
        q, k, v = (tokens.unflatten(0, (count, length)).transpose(1, 2) for tokens in run)
        found = scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        parts.append(found.transpose(1, 2).flatten(0, 1))

    if shared is not None:
        parts += _answered(shared, states, runs[len(whole) :], options)
    return torch.cat(parts)[None], None


def _answered(
    shared: SharedPrompts, states: list[Tensor], runs: list[tuple[Tensor, ...]], options: dict[str, Any]
) -> list[Tensor]:
    """Attention of each run of answers to its prompts and to itself; (tokens, heads, d) each."""
    sizes = [each.prompt * each.count for each in shared.answers]
    keys, values = (each.index_select(0, shared.prompts).split(sizes) for each in states[1:])

    parts = []
    for answers, (q, *own), *prompts in zip(shared.answers, runs, keys, values, strict=True):
        both = [
            torch.cat([before.unflatten(0, (answers.count, -1)), after.unflatten(0, (answers.count, -1))], 1)
            for before, after in zip(prompts, own, strict=True)
        ]

        q, k, v = (each.transpose(1, 2) for each in (q.unflatten(0, (answers.count, -1)), *both))
        found = scaled_dot_product_attention(q, k, v, attn_mask=answers.mask, **options)
        parts.append(found.transpose(1, 2).flatten(0, 1))
    return parts


def pack_bounds(position_ids: Tensor) -> dict[str, Any]:
    """A pack's samples as FlashAttention and `packed_sdpa` want them, once per forward; position_ids (T,) int64."""
    starts = (position_ids == 0).nonzero()[:, 0].int()
    bounds = torch.cat((starts, starts.new_tensor([len(position_ids)])))  # (samples + 1,)
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def takes_bounds(model: Any) -> bool:
    """Whether the model's attention needs `pack_bounds`."""
    return any(name in str(model.config._attn_implementation) for name in ("flash", NAME))


def can_pack(config: Any) -> bool:
    """Whether every layer attends to all that came before: no sliding window."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return set(kinds) == {"full_attention"}
    return getattr(config, "sliding_window", None) is None


AttentionInterface.register(NAME, packed_sdpa)
