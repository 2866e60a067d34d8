"""The real engine, loaded with the learner's export, computes what the learner computes, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rl.models.families import FAMILIES
from rl.models.policy import Policy, load_policy, local_rows
from tests.rl.models.tiny_families import VOCABULARY, save_family
from tests.rollout.generator.vllm_rig import TOLERANCE, Rig

PROMPTS = [[(13 * place + 7 * prompt) % (VOCABULARY - 6) + 3 for place in range(30)] for prompt in range(4)]


class FamilyRig(Rig):
    """Policy version n is the random model of seed n of one family, as the learner loads and exports it."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.models = folder
        # In one process vLLM would change the classes of transformers that it runs some families with.
        super().__init__(tied=False, own_process=True)

    def policy(self, n: int) -> Policy:
        folder = self.models / str(n)
        return load_policy(folder if folder.exists() else save_family(self.family, folder, seed=n))

    def model(self, n: int) -> Any:
        self.policy(n)
        return AutoModelForCausalLM.from_pretrained(self.models / str(n), dtype=torch.float32).eval()

    def write(self, n: int, without: str = "") -> None:
        weights = {name: rows.clone() for name, rows, _ in local_rows(self.policy(n))}
        save_file(weights, self.folder / f"written.{n}")


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_learner_agree_over_an_update(family: str, tmp_path: Path) -> None:
    rig = FamilyRig(family, tmp_path)
    rig.start()
    try:
        for _ in range(2):
            requests = [rig.request(prompt) for prompt in PROMPTS]
            for request, sampled in zip(requests, rig.generate(*requests), strict=True):
                ids = torch.tensor([*request.prompt_ids, *sampled.token_ids])
                with torch.no_grad():
                    logp = rig.policy(rig.n)(ids, torch.arange(len(ids))).logp[len(request.prompt_ids) :]
                assert sampled.logp and np.abs(logp.numpy() - np.array(sampled.logp)).max() < TOLERANCE
            rig.update()
    finally:
        rig.stop()
