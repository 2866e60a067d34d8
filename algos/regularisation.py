"""What is added to any loss: the KL to a reference policy and an entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from algos.kl import KLEstimator, kl_loss
from algos.types import LossInputs, LossResult


@dataclass(frozen=True)
class Regularisation:
    """Coefficients per token; `kl_estimator` as in `algos.kl`."""

    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0

    @property
    def entropy_gradient(self) -> bool:
        return self.entropy_coef != 0

    def __call__(self, inputs: LossInputs, result: LossResult) -> LossResult:
        """The loss + kl_coef * KL - entropy_coef * entropy, each per token.

        The estimate of the KL is a metric wherever the reference is known, charged here or in the reward.
        """
        per_token = result.per_token
        metrics = dict(result.metrics)
        if inputs.logp_reference is not None:
            kl: Tensor = inputs.masked(kl_loss(self.kl_estimator, inputs.logp_current, inputs.logp_reference))
            metrics["kl_reference"] = kl.detach()
            if self.kl_coef:
                per_token = per_token + self.kl_coef * kl
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * torch.where(inputs.mask, inputs.entropy, 0)
        return LossResult(per_token, metrics)
