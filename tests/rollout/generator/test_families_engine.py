"""The real engine, loaded with the learner's export, computes what the learner computes, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rl.learner.publish import probe_logp
from rl.models.families import FAMILIES
from rl.models.policy import Policy
from tests.rl.models.tiny_families import save_family
from tests.rollout.generator.vllm_rig import PROBE, TOLERANCE, Rig

VERSIONS = 3
MOST_USED = ("llama",)  # qwen3 is what all other tests of the engine run


class FamilyRig(Rig):
    """Policy version n is the random model of seed n of one family; what the learner says of it is in `expected`.

    All of that is made before the engine starts, since vLLM runs some families with the classes of transformers.
    """

    def __init__(
        self,
        family: str,
        folder: Path,
        dtype: str = "float32",
        own_process: bool = False,
        settings: Sequence[str] = (),
        device: str = "cpu",
        **shape: Any,
    ) -> None:
        """shape: changes of the family's."""
        self.folders = [save_family(family, folder / str(n), seed=n, dtype=dtype, **shape) for n in range(VERSIONS)]
        self.policies = [Policy.load(each) for each in self.folders]
        self.expected = [np.array(probe_logp(policy, PROBE)) for policy in self.policies]
        super().__init__(tied=False, device=device, dtype=dtype, own_process=own_process, settings=settings)
        for n, policy in enumerate(self.policies):
            rows = {name: rows.clone() for name, rows, _ in policy.export()}
            save_file(rows, self.folder / f"written.{n}")

    def model(self, n: int) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folders[n], dtype=torch.float32)


@pytest.mark.parametrize(
    "family", [each if each in MOST_USED else pytest.param(each, marks=pytest.mark.families) for each in FAMILIES]
)
def test_engine_and_learner_agree_over_updates(family: str, tmp_path: Path) -> None:
    agree_over_updates(FamilyRig(family, tmp_path))
    save_family(family, tmp_path / "again")  # as later tests of this process do


@pytest.mark.docs
@pytest.mark.parametrize("whole_experts", [False, True])
def test_two_ranks_of_a_mixture(whole_experts: bool, tmp_path: Path) -> None:
    """Each has a part of every expert, or half of the experts."""
    settings = ["generator.tensor_parallel=2", f"generator.options.expert_parallel={whole_experts}"]
    agree_over_updates(FamilyRig("qwen3_moe", tmp_path, own_process=True, settings=settings))


def agree_over_updates(rig: FamilyRig) -> None:
    rig.start()
    try:
        for n in range(1, VERSIONS):
            found = np.array(rig.update().probe_logp)
            assert np.abs(found - rig.expected[n]).max() < TOLERANCE
            assert np.abs(found - rig.expected[n - 1]).max() > 0.1  # it would notice an update that did nothing
    finally:
        rig.stop()
