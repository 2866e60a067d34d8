"""Log-probability and entropy of given tokens, without ever holding a large (T, vocabulary) tensor.

The head works on `chunk` tokens at a time. Forward saves the hidden states and each token's logsumexp; backward
recomputes the chunk's logits. For 2 048 tokens and 151 936 entries this needs 0.5 GiB instead of 4.7 GiB. Only where
all probabilities together take at most `KEPT_BYTES` are they kept for backward.
All arithmetic beyond the products of half-precision inputs is float32 (float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl.models.compiled import compiled

HALF = (torch.bfloat16, torch.float16)
KEPT_BYTES = 1 << 26


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int = 256,
    entropy_gradient: bool = False,
    compile: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log pi(target) and the entropy of pi = softmax(hidden @ weight.T / temperature), both (T,), in nats.

    hidden (T, H), weight (V, H), targets (T,) int64; T may be 0. The entropy carries a gradient only when
    `entropy_gradient` is set (an entropy bonus needs it; it costs one more pass over the chunk in backward).

    compile: what is done with logits is compiled, which reads them twice in forward and once in backward.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedHead.apply
    return apply(hidden, weight, targets, temperature, chunk, entropy_gradient, compile)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk: int,
        entropy_gradient: bool,
        compile: bool,
    ) -> tuple[Tensor, Tensor]:
        math = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        operand = _operand(weight, math)
        logp = hidden.new_empty(len(hidden), dtype=math)
        entropy = torch.empty_like(logp)
        lse = torch.empty_like(logp)  # logsumexp of the logits
        small = not compile and len(hidden) * len(weight) * math.itemsize <= KEPT_BYTES
        kept = hidden.new_empty(len(hidden), len(weight), dtype=math) if small else None  # probabilities
        scores = compiled(_scores) if compile else _scores

        for part in _chunks(len(hidden), chunk):
            logits = _product(_operand(hidden[part], math), operand.T, math)  # (chunk, V)
            room = None if compile else logits
            probs = None if kept is None else kept[part]
            logp[part], entropy[part], lse[part] = scores(logits, targets[part], temperature, room, probs)

        ctx.save_for_backward(hidden, weight, targets, lse, kept, entropy if entropy_gradient else None)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.compile = compile
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, kept, entropy = ctx.saved_tensors
        math = lse.dtype
        operand = _operand(weight, math)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Summed over chunks in full precision: adding up in bfloat16 would lose most of the small terms.
        grad_weight = torch.zeros_like(weight, dtype=math) if ctx.needs_input_grad[1] else None
        slope = compiled(_slope) if ctx.compile else _slope

        for part in _chunks(len(hidden), ctx.chunk):
            rows = _operand(hidden[part], math)
            values = _product(rows, operand.T, math) if kept is None else kept[part]
            norm = lse[part] if kept is None else None
            room = None if ctx.compile else values
            bonus = None if entropy is None else (entropy[part], grad_entropy[part])

            grad, chosen = slope(
                values, norm, room, targets[part], ctx.temperature, grad_logp[part], bonus, operand.dtype
            )
            grad.scatter_(-1, targets[part, None], chosen)
            if grad_hidden is not None:
                grad_hidden[part] = _product(grad, operand, math).to(hidden.dtype)
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, rows)

        found = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, found, *[None] * 5


def _scores(
    logits: Tensor, targets: Tensor, temperature: float, room: Tensor | None, probs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the targets, entropy and logsumexp, (chunk,) each, of logits (chunk, V) over the temperature.

    room: the logits themselves, where nobody needs them afterwards. probs: is given the probabilities.
    """
    logits = torch.div(logits, temperature, out=room)
    largest = logits.amax(-1, keepdim=True)
    logits -= largest
    chosen = logits.gather(-1, targets[:, None])[:, 0]

    # One pass of exp for all three: H = log sum(e^z) - sum(e^z z) / sum(e^z), exact where z <= 0.
    odds = logits.exp()
    total = odds.sum(-1)
    log_total = total.log()
    if probs is not None:
        torch.div(odds, total[:, None], out=probs)
    entropy = log_total - odds.mul_(logits).sum(-1) / total
    return chosen - log_total, entropy, largest[:, 0] + log_total


def _slope(
    values: Tensor,
    lse: Tensor | None,
    room: Tensor | None,
    targets: Tensor,
    temperature: float,
    grad_logp: Tensor,
    bonus: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The gradient of logits (chunk, V) but for the targets', and that of the targets (chunk, 1), in `dtype`.

    values: logits with their logsumexp, or probabilities without one. room: as in `_scores`. bonus: the entropy and its
    gradient. The targets' own is told apart because a scatter in the midst would cut one pass into three.
    """
    probs = values if lse is None else torch.div(values, temperature, out=room).sub_(lse[:, None]).exp_()
    if bonus is None:
        grad = probs * -grad_logp[:, None]
    else:  # dH/dlogit_v = -p_v (log p_v + H)
        entropy, grad_entropy = bonus
        grad = grad_entropy[:, None] * (torch.special.entr(probs) - probs * entropy[:, None])
        grad -= grad_logp[:, None] * probs

    chosen = grad.gather(-1, targets[:, None]) + grad_logp[:, None]
    return grad.div_(temperature).to(dtype), chosen.div_(temperature).to(dtype)


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(first, min(first + chunk, length)) for first in range(0, length, chunk)]


def _operand(matrix: Tensor, math: torch.dtype) -> Tensor:
    """A GPU multiplies half-precision matrices exactly and sums in float32; a CPU is given float32 copies."""
    return matrix if matrix.is_cuda and matrix.dtype in HALF else matrix.to(math)


def _product(left: Tensor, right: Tensor, math: torch.dtype) -> Tensor:
    if left.is_cuda and left.dtype in HALF and right.dtype == left.dtype:
        return torch.mm(left, right, out_dtype=math)
    return left.to(math) @ right.to(math)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product to `total`; on a GPU without making a matrix of it first, where its torch can (unrun)."""
    if not total.is_cuda:
        total += left @ right
    elif left.dtype == right.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.dtype == right.dtype and _adds_products(total.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += _product(left, right, total.dtype)


@cache
def _adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch adds products of half precision to a sum in float32."""
    one = torch.ones(8, 8, device=device, dtype=dtype)
    total = one.float()
    try:
        torch.addmm(total, one, one, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return True
