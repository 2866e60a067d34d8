"""The routers of a mixture of experts: told which experts an engine had chosen for a token, and watched.

Where engine and learner round differently, their routers choose other experts for some tokens, and each such choice
moves log-probabilities by far more than rounding does. So the engine tells its choices (the column `routed_experts`),
and the learner's routers take them: their weights, and so their gradients, remain those of the learner's own logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rl.models.families import FAMILIES


class Routing(NamedTuple):
    """What the R routers of a model have done in one forward: sums over the tokens that were watched."""

    experts: Tensor  # (R, E) float32, tokens of each expert
    entropy: Tensor  # (R,) float32, nats of each router's distribution over experts
    differ: Tensor  # (R,) float32, tokens for which it would have chosen other experts than it was told
    tokens: Tensor  # (R,) float32


class Routers:
    """Of one decoder; it has none where its family is dense."""

    def __init__(self, decoder: Any) -> None:
        family = FAMILIES.get(decoder.config.model_type)
        self._sigmoid = family is not None and family.routing == "sigmoid"
        self._told: dict[nn.Module, Tensor | None] = {}
        self._watched: list[tuple[Tensor, ...]] | None = None
        self._rows = torch.empty(0, dtype=torch.int64)
        self._blocks: list[nn.Module] = []
        if family is None or family.routing is None:
            return

        for index, layer in enumerate(decoder.layers):
            for name, module in layer.named_modules():
                if type(module).__name__.lower().endswith("topkrouter"):
                    self._told[module] = None
                    self._blocks.append(layer.get_submodule(name.rpartition(".")[0]))
                    # Of the layer, so that it is told again where its activations are computed again.
                    layer.register_forward_pre_hook(partial(self._tell, module, index), with_kwargs=True)
                    module.register_forward_hook(self._route)

    def __len__(self) -> int:
        return len(self._told)

    def blocks(self) -> list[nn.Module]:
        """The modules of layers that a router and its experts are part of."""
        return self._blocks

    def watch(self, rows: Tensor) -> None:
        """To be called before a forward. rows (S,): of the computed tokens, those that count."""
        self._watched = []
        self._rows = rows

    def seen(self) -> Routing | None:
        """What they did since `watch`."""
        watched, self._watched = self._watched, None
        return Routing(*(torch.stack(each) for each in zip(*watched, strict=True))) if watched else None

    def _tell(self, router: nn.Module, index: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        routing = kwargs.get("routing")  # (C, layers, k)
        self._told[router] = None if routing is None else routing[:, index]

    def _route(self, router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...] | None:
        """A router answers logits (C, E), weights (C, k) and experts (C, k), or these in the opposite order."""
        last = 2 if output[0].is_floating_point() else 0
        own, logits = output[last], output[2 - last]
        told = self._told[router]
        chosen = own
        if told is not None:
            known = told[:, :1] < logits.shape[-1]
            chosen = torch.where(known, told.to(own.dtype), own)
        if self._watched is not None:
            self._watched.append(_done(*(each.detach().index_select(0, self._rows) for each in (logits, own, chosen))))
        if told is None:
            return None

        weights = self._weights(router, logits, chosen).to(output[1].dtype)
        return (logits, weights, chosen) if last else (chosen, weights, logits)

    def _weights(self, router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
        scores = logits.float().sigmoid() if self._sigmoid else logits.float().softmax(-1)
        weights = scores.gather(-1, chosen)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        scale: float = getattr(router, "routed_scaling_factor", 1.0)
        return weights * scale


@torch.no_grad()
def _done(logits: Tensor, own: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
    """A row of each part of `Routing`."""
    logp = logits.float().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum()
    experts = logits.new_zeros(logits.shape[-1], dtype=torch.float32)
    experts.index_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.float32))
    differ = (own.sort(-1)[0] != chosen.sort(-1)[0]).any(-1).sum().float()
    return experts, entropy, differ, torch.full_like(entropy, len(logits))
