"""The loop of one process: which version a batch is of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from experiments.plain_loop import PlainLoop, PlayedEpisode, make_batch_part, run
from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model
from rl.config.schema import load_config
from rl.learner.update import with_logp
from rl.models.packing import make_packs
from rl.models.policy import Policy

SMALL = TinyRecipe(hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_size=48, sft_steps=5, sft_batch=16)
# The untrained model earns no reward; the entropy bonus moves it all the same.
FEW = [
    "seed=1",
    "steps=4",
    "rollout.groups_per_batch=2",
    "rollout.group_size=2",
    "sampling.max_tokens=6",
    "eval.tasks=0",
    "learner.lr=1e-2",
    "algo.loss=reinforce",
    "algo.entropy_coef=0.1",
]


@pytest.mark.parametrize("lag", [0, 2])
def test_batches_are_of_the_policy_lag_updates_ago(lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The behaviour log-probabilities of batch s are, by the learner's own forward, those of version s - lag."""
    folder = ensure_tiny_model(SMALL, tmp_path, log=lambda line: None)
    weights: list[dict[str, torch.Tensor]] = []
    batches: list[Sequence[PlayedEpisode]] = []
    train = PlainLoop.train

    def spy(self: PlainLoop, step: int, batch: Sequence[PlayedEpisode], lag: int = 0) -> dict[str, float]:
        weights.append({name: value.clone() for name, value in self.policy.state_dict().items()})
        batches.append(batch)
        return train(self, step, batch, lag)

    monkeypatch.setattr(PlainLoop, "train", spy)
    rows = list(run(PlainLoop(load_config("experiments/math_cpu.yaml", FEW), folder), lag))
    assert [row["loss/token_staleness"] for row in rows[:-1]] == [min(step, lag) for step in range(4)]
    policy = Policy.load(folder)

    def distance(step: int, version: int) -> float:
        """Largest |difference| between the batch's log-probabilities and those of a version, in nats."""
        policy.load_state_dict(weights[version])
        packs = with_logp(
            policy, make_packs(make_batch_part(step, batches[step], 2, 0), 64, 0), "logp_proximal", temperature=1
        )
        gaps = [(pack.columns["logp_proximal"] - pack.logp_behavior)[pack.mask].abs().max() for pack in packs]
        return float(max(gaps))

    for step in range(4):
        version = max(0, step - lag)
        assert distance(step, version) < 1e-4
        assert all(distance(step, other) > 1e-3 for other in range(4) if other != version)
