"""`learner.optimizer_states=host`: float32 weights and AdamW's moments in the memory of the host.

The device holds weights in the dtype of its forward, and gradients. A step of the optimizer fetches the gradients,
moves the weights here, and gives the device its copies anew. In between nothing of these crosses the bus.

A parameter of lower precision cannot have a gradient in float32. Where ranks add theirs up in float32, each pack's is
taken from the parameter and added to a sum beside it, so that many packs round no more than one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rl.models.loading import copied
from rl.models.policy import PackedModel
from rl.models.protocol import local
from rl.wire.page_lock import PageLock


class HostWeights(nn.Module):
    """What is trained of a model, by the model's own names: a checkpoint of either is one of the other."""

    def __init__(
        self, model: PackedModel, device: str, dtype: torch.dtype | None, gradients: torch.dtype = torch.float32
    ) -> None:
        """model: read into the host's memory; it moves to the device, where its parameters are copies in `dtype`.

        dtype: None keeps each parameter's own. gradients: in which packs are added up.
        """
        super().__init__()
        self._names, self._copies = zip(*model.trainable(), strict=True)
        self._masters = [nn.Parameter(parameter.detach()) for parameter in self._copies]
        self._fetched: list[Tensor] = []  # room for gradients, from the first step on
        self._sums: dict[int, Tensor] = {}

        copied(model, device, dtype)
        masters = dict(zip(self._copies, self._masters, strict=True))
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not isinstance(tensor, nn.Parameter) or tensor in masters:
                self._name(name, masters.get(tensor, tensor))

        for number, parameter in enumerate(self._copies):
            if gradients == torch.float32 != parameter.dtype:
                parameter.register_post_accumulate_grad_hook(partial(self._add_up, number))
        hooked: Any = self  # torch does not say what types it takes
        hooked.register_load_state_dict_post_hook(lambda *_: self.give_back(room=False))

        self._lock = PageLock(device)
        weakref.finalize(self, self._lock.close)
        self._lock_pages(self._masters)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Float32 weights by name, with tied ones once."""
        return zip(self._names, self._masters, strict=True)

    @torch.no_grad()
    def fetch_gradients(self) -> None:
        """Those of the device become those of the weights here."""
        if not self._fetched:
            self._fetched = [torch.empty_like(master) for master in self._masters]
            self._lock_pages(self._fetched)

        for number, (parameter, master) in enumerate(zip(self._copies, self._masters, strict=True)):
            found = self._sums.pop(number, parameter.grad)
            parameter.grad = None
            master.grad = None if found is None else self._fetched[number]
            if found is not None:
                local(self._fetched[number]).copy_(local(found).float(), non_blocking=True)
        self._wait()

    @torch.no_grad()
    def give_back(self, *, room: bool = True) -> None:
        """The device's copies are those of the weights here.

        room: for one more tensor in float32 there, which is faster. Engines that share the device may have it just now.
        """
        for parameter, master in zip(self._copies, self._masters, strict=True):
            rows = local(parameter)
            rows.copy_(local(master).to(rows.device, non_blocking=True) if room else local(master).to(rows.dtype))
        self._wait()

    @torch.no_grad()
    def _add_up(self, number: int, parameter: Tensor) -> None:
        """After the backward of a pack."""
        assert parameter.grad is not None
        grad, parameter.grad = parameter.grad, None
        if number in self._sums:
            self._sums[number] += local(grad)
        else:
            self._sums[number] = local(grad).float()

    def _name(self, name: str, tensor: Tensor) -> None:
        *owners, last = name.split(".")
        module: nn.Module = self
        for owner in owners:
            if owner not in module._modules:
                module.add_module(owner, nn.Module())
            module = module.get_submodule(owner)

        if isinstance(tensor, nn.Parameter):
            module.register_parameter(last, tensor)
        else:
            module.register_buffer(last, tensor)

    def _lock_pages(self, tensors: list[Tensor] | list[nn.Parameter]) -> None:
        for tensor in tensors:
            self._lock.add(local(tensor).numpy().data)

    def _wait(self) -> None:
        device = self._copies[0].device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
