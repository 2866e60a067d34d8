"""How the losses of single tokens become the loss of a minibatch: one weight per sample, from the whole minibatch.

The learner divides the weighted sum by the minibatch's token count. As the weights depend on the minibatch as a whole
and on nothing else, no split into packs, micro-batches or ranks changes the sum.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]


def sample_weights(kind: Aggregation, tokens: Tensor, constant: int = 0) -> Tensor:
    """(N,) float64: the weight of each token of a sample, relative to a mean over all tokens.

    tokens (N,) int64 of each sample that count in the loss, of every rank; samples with none count as absent.

        token     mean over all tokens: every token weighs the same (DAPO, https://arxiv.org/abs/2503.14476)
        sequence  mean over each sample's tokens, then over samples (GRPO, https://arxiv.org/abs/2402.03300, eq. 3)
        constant  sum over each sample's tokens / constant, then the mean over samples: the length of an answer
                  neither dilutes nor multiplies its gradient (Dr. GRPO, https://arxiv.org/abs/2503.20783)
    """
    tokens = tokens.double()
    if kind == "token":
        return torch.ones_like(tokens)
    samples = (tokens > 0).sum().clamp(min=1)
    share = 1 / tokens.clamp(min=1) if kind == "sequence" else torch.full_like(tokens, 1 / constant)
    return share * tokens.sum() / samples
