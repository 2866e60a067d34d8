"""What a step shows beside its metrics: each token's log-probability and pull, the gradient, and a trail of digests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from algos.types import LossInputs, LossResult
from rl.learner.tensor_digests import place_digests, tensor_digests
from rl.learner.trainer import Trainer
from rl.learner.update import objective
from rl.models.packing import Pack
from rl.models.protocol import local

TRAIL = ("advantages", "weights", "log-probabilities", "entropy", "loss")
"""What is computed of each token, in this order."""


class Watch:
    """The observer of one rank's trainer. `tokens`: by row of the batch a table (values, L loss tokens), in float64."""

    def __init__(self, trainer: Trainer) -> None:
        self._algorithm = trainer.algorithm
        self._named = list(trainer.weights.trainable())
        self.begin(deep=False)
        trainer.observed_by(self)
        trainer.optimizer.adamw.register_step_pre_hook(self._before_step)

    def begin(self, *, deep: bool) -> None:
        """A step. deep: whether gradient, pulls and what leads to the trail are looked at as well."""
        self._deep = deep
        self.tokens: dict[int, dict[str, Tensor]] = {}
        self.gradient: list[tuple[str, Tensor]] = []

    def _before_step(self, *_: Any) -> None:
        """Keep the gradient of the first one."""
        if self._deep and not self.gradient:
            self.gradient = [(name, each.grad.clone()) for name, each in self._named if each.grad is not None]

    def __call__(self, pack: Pack, inputs: LossInputs, result: LossResult) -> None:
        assert pack.layout is not None
        if not pack.members:
            return
        found = {"log-probabilities": inputs.logp_current}
        if self._deep:
            found |= {"advantages": inputs.advantages, "weights": pack.token_weights, "entropy": inputs.entropy}
            found |= {"loss": result.per_token, "age": inputs.staleness, "pull": self._pull(pack, inputs)}

        generated = pack.layout.generated
        counts = torch.bincount(pack.sample.index_select(0, generated), minlength=len(pack.members)).tolist()
        split = {name: each.index_select(0, generated).double().cpu().split(counts) for name, each in found.items()}
        for place, member in enumerate(pack.members):
            self.tokens[member] = {name: parts[place] for name, parts in split.items()}

    def _pull(self, pack: Pack, inputs: LossInputs) -> Tensor:
        """(T,) how strongly the loss pulls each token's log-probability up; a gradient of the entropy is left out."""
        with torch.enable_grad():
            logp = inputs.logp_current.detach().requires_grad_()
            again = replace(inputs, logp_current=logp, entropy=inputs.entropy.detach())
            _, total = objective(self._algorithm, again, pack)
            return -torch.autograd.grad(total, logp)[0] if total.requires_grad else torch.zeros_like(logp)

    def trail(self) -> dict[str, str]:
        """Digests of what the step has computed, in the order in which it was. All ranks call it together."""
        tables = {f"{name} of the tokens": {row: each[name] for row, each in self.tokens.items()} for name in TRAIL}
        gradients = tensor_digests(self.gradient)
        return place_digests(tables) | {f"gradient of {name}": digest for name, digest in gradients.items()}

    def vector(self) -> Tensor:
        """This rank's part of the gradient, in float64; empty where no step was made."""
        parts = [local(each).double().flatten() for _, each in self.gradient]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
