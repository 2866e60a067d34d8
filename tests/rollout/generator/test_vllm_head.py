"""An engine in bfloat16 multiplies with its head as the learner does: it rounds what goes in, and not the logits.

A number that all logits share is nothing to a distribution, but logits that are far from zero lose their small bits.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from tests.rollout.generator.vllm_rig import ON_A_GPU, PROBE, Rig

pytestmark = pytest.mark.slow
SHARED = 10.0
FAR = 32.0  # from here on bfloat16 has steps of a quarter


class FarFromZero(Rig):
    """Random models whose logits share some tens, with weights that bfloat16 has."""

    def model(self, n: int) -> Any:
        model = deepcopy(super().model(n))
        head = model.lm_head.weight.data
        head += SHARED * torch.randn(head.shape[1], generator=torch.Generator().manual_seed(n))
        return model.bfloat16().float()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_logits_are_not_rounded(device: str) -> None:
    """Of the same weights 0.013 nats on a CPU, which the other layers round; 0.097 with logits in bfloat16."""
    rig = FarFromZero(tied=False, device=device, dtype="bfloat16", own_process=device != "cpu")
    rig.start()
    requests = [rig.request([*PROBE, last], max_tokens=64) for last in range(8)]
    results = rig.generate(*requests)
    rig.stop()

    with torch.no_grad():
        logits = rig.model(0)(torch.tensor([PROBE])).logits
    errors = np.concatenate([rig.errors(*pair) for pair in zip(requests, results, strict=True)])
    assert logits.abs().mean() > FAR
    assert errors.mean() < 0.03
