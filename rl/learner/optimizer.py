"""AdamW with warm-up and decay of the learning rate, and clipping by the global gradient norm.

The schedule is a pure function of the batch that is being trained, which carries the share of the run's time: a
checkpoint needs no state for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rl.config.schema import LearnerConfig
from rl.models.protocol import whole


def learning_rate(config: LearnerConfig, step: int, last_step: int, over: float = 0.0) -> float:
    """Learning rate of batch `step` (0-based) in a run whose last batch is `last_step - 1`.

    Linear warm-up over `warmup_steps` batches, the first of which already moves (lr / warmup_steps); then
    constant, or down to `min_lr_fraction * lr` at the last batch, linearly or along half a cosine. `over` is the share
    of the run's time: where it is the larger one, it counts in the place of the share of the steps.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    length = max(1, last_step - 1 - config.warmup_steps)
    done = min(1.0, max(over, (step - config.warmup_steps) / length))
    shape = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_fraction + (1 - config.min_lr_fraction) * shape)


class Optimizer:
    """`step` clips, sets the learning rate and updates; gradients are cleared afterwards."""

    def __init__(
        self,
        trainable: Iterable[tuple[str, nn.Parameter]],
        config: LearnerConfig,
        last_step: int,
        still_steps: int = 0,
    ) -> None:
        """trainable: parameters by name.

        still_steps: batches during which nothing moves yet, though AdamW's moments already follow the gradient.
        """
        self._config = config
        self._last_step = last_step
        self._still_steps = still_steps

        self._parameters = [parameter for _, parameter in trainable]
        matrices = [parameter for parameter in self._parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in self._parameters if parameter.ndim < 2]  # norms and biases: no decay
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": config.weight_decay}]
        if vectors:
            groups.append({"params": vectors, "weight_decay": 0.0})
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    def step(self, batch_step: int, over: float = 0.0) -> tuple[float, float]:
        """One update with the accumulated gradients. Returns (gradient norm before clipping, learning rate).

        Raises FloatingPointError, with the parameters untouched, when the norm is not finite.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm)
        grad_norm = float(whole(norm))
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm of step {batch_step} is {grad_norm}")

        rate = 0.0
        if batch_step >= self._still_steps:
            still = self._still_steps
            rate = learning_rate(self._config, batch_step - still, self._last_step - still, over)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return grad_norm, rate
