"""Rows that several sequences read, as those of a beginning that they share (`rl.models.layout`)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def rows_of(values: Tensor, places: Tensor) -> Tensor:
    """(K, ...): the rows of `values` (C, ...) at `places` (K,), each as often as it is named there.

    A row's gradient is the sum over all that read it, in float32. In bfloat16 a GPU would round after each addend, so
    that a sum stands still once it is 256 times one of them.
    """
    return cast(Tensor, _Rows.apply(values, places))  # type: ignore[no-untyped-call]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = values.shape[0]
        return values.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = grad.new_zeros((ctx.rows, *grad.shape[1:]), dtype=wide)
        return total.index_add_(0, places, grad.to(wide)).to(grad.dtype), None
