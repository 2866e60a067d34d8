"""An engine in bfloat16 multiplies with its head as the learner does: it rounds what goes in, and not the logits.

A number that all logits share is nothing to a distribution, but logits that are far from zero lose their small bits.
"""

from __future__ import annotations

import weakref
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample import prompt_logprob

from launch.machine import Machine
from launch.memory import estimate
from rl.config.schema import load_config
from rl.models.shape import ModelShape
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


def test_a_probe_among_a_whole_step_has_its_logits_where_the_plan_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes logits of all requests that are computed again in a step with a probe, and does not try that before it
    gives what is left to the cache."""
    __import__("rollout.generator.engines.vllm_worker")  # sets it, as in an engine
    alive: list[int] = []
    most = []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(len(hidden), 2)
        alive.append(len(hidden))
        weakref.finalize(made, alive.remove, len(hidden))
        most.append(sum(alive))
        return made

    def scores(made: torch.Tensor, _: int, ids: torch.Tensor, *, logits_mode: bool) -> LogprobsTensors:
        return LogprobsTensors(ids[:, None], made.sum(1), ids)

    monkeypatch.setattr(prompt_logprob, "compute_topk_scores", scores)
    step = torch.zeros(8192, dtype=torch.int64)
    prompt_logprob.compute_prompt_logprobs_with_chunking(step, step[:, None], logits, 0)
    assert planned_rows(8192) >= max(most) > 1


def planned_rows(vocabulary: int) -> float:
    """Of logits, of one sequence at a time: by two plans whose vocabularies are that far apart."""
    config = load_config(None, ["generator.max_num_seqs=1"])
    parts = []
    for size in (vocabulary, 2 * vocabulary):
        shape = ModelShape(layers=1, hidden=64, heads=1, kv_heads=1, head_dim=64, width=64, active=64, vocabulary=size)
        parts += [each.parts for each in estimate(config, "cuda", shape, Machine()) if each.what == "engine's GPU"]
    return (parts[1]["largest step"] - parts[0]["largest step"]) / (4 * vocabulary)
