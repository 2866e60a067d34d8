"""A rank that is alone: what it calls computes with copies of its weights in the dtype of the forward.

FSDP casts so for ranks that share a model, and a forward and its backward are the same to the last bit. For one rank it
also gathers, which copies each layer twice more in every pass, and takes Python a millisecond a layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def compute_in(root: nn.Module, parts: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Each of `parts`, and what else is in `root`, has its weights in `dtype` while its forward runs; their gradients
    are in the dtype of the weights. Copies live as long as the graph of a forward needs them."""
    taken: set[nn.Module] = set()
    for part in parts:
        _Casting(part, list(part.modules()), dtype)
        taken.update(part.modules())
    _Casting(root, [each for each in root.modules() if each not in taken], dtype)


class _Casting:
    """Around the forward of one module, also where that is computed again for a backward."""

    def __init__(self, called: nn.Module, owners: list[nn.Module], dtype: torch.dtype) -> None:
        """owners: the modules whose own weights are cast."""
        self._dtype = dtype
        self._places = [(owner._parameters, name) for owner in owners for name in owner._parameters]
        self._held: list[nn.Parameter | None] = []
        called.register_forward_pre_hook(self._begin, with_kwargs=True)
        called.register_forward_hook(self._end, always_call=True)

    def _begin(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._end()  # after a Ctrl-C torch does not
        self._held = [owned[name] for owned, name in self._places]
        others = dict.fromkeys(each for each in self._held if each is not None and each.dtype != self._dtype)
        if others:
            copies = dict(zip(others, _Cast.apply(self._dtype, *others), strict=True))  # type: ignore[no-untyped-call]
            for (owned, name), weight in zip(self._places, self._held, strict=True):
                if weight in copies:
                    owned[name] = copies[weight]
        return self._given(args), {name: self._given(each) for name, each in kwargs.items()}

    def _given(self, each: Any) -> Any:
        """Some families make the sines and cosines of positions in float32."""
        if type(each) is tuple:  # and no class of its own
            return tuple(map(self._given, each))
        floats = isinstance(each, Tensor) and each.is_floating_point()
        return each.to(self._dtype) if floats else each

    def _end(self, *_: object) -> None:
        for (owned, name), weight in zip(self._places, self._held, strict=False):  # none, where it did not begin
            owned[name] = weight
        self._held = []


class _Cast(torch.autograd.Function):
    """All weights of a layer by one kernel, and all their gradients by another."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.own = weights[0].dtype
        made = _cast(weights, dtype)
        trained = zip(made, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*(each for each, moves in trained if not moves))
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = iter(_cast([grad for grad in grads if grad is not None], ctx.own))
        return None, *(None if grad is None else next(found) for grad in grads)


def _cast(tensors: Iterable[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    given = tuple(tensors)
    made = tuple(torch.empty_like(each, dtype=dtype) for each in given)
    if made:
        torch._foreach_copy_(made, given)
    return made
