"""`placement=alternate`: what a rank trains is on its device while it has its turn, and in the host's memory else.

Both ways each parameter, and each moment of AdamW's, is copied and stays the same object to everybody who holds it.
Gradients are there within a step only. What is not on the device can be read, saved and exported where it is; it cannot
compute. With `learner.optimizer_states=host` the device keeps its copies of the weights, and nothing is moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl.models.loading import copied, copy_of


class Moves:
    """Everything begins on the host."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], device: str) -> None:
        self._models = models
        self._optimizers = optimizers
        self._device = torch.device(device)

    def to_device(self) -> None:
        self._to(self._device)

    def to_host(self) -> None:
        """The device has room again for others, also what torch kept for later."""
        self._to(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def _to(self, device: torch.device) -> None:
        for model in self._models:
            copied(model, device)
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                state |= {name: copy_of(each, device) for name, each in state.items() if isinstance(each, Tensor)}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
