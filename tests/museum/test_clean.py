"""Runs without a fault raise no alarm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl.learner.credit import Minibatch
from rl.wire.messages import BatchPart
from rollout.episodes.environment import Step
from tests.museum.lab import Game, Lab
from tests.museum.reward_faults import forked

pytestmark = pytest.mark.slow

CLEAN = {
    "synchronous": [],
    "asynchronous": ["rollout.alpha=1"],
    "minibatches": ["learner.minibatches=2", "rollout.alpha=1"],
    "reference": ["algo.kl.coef=0.1"],
    "decayed": ["learner.schedule=cosine", "learner.warmup_steps=1"],
    "exact": ["rollout.alpha=1", "alarms.exact=1e-4"],
    "exact minibatches": ["rollout.alpha=2", "learner.minibatches=2", "alarms.exact=1e-4"],
    "adapters": ["model.lora={rank: 4}", "algo.kl.coef=0.1", "rollout.alpha=1", "alarms.exact=1e-4"],
    "adapters of a few layers": ["model.lora={rank: 1, targets: [v_proj]}", "learner.warmup_steps=1"],
    "other advantages": ["algo.advantage=turn"],
}


@pytest.mark.parametrize("overrides", CLEAN.values(), ids=CLEAN)
def test_a_clean_run_raises_nothing(model_folder: Path, overrides: list[str]) -> None:
    lab = Lab(model_folder, *overrides, steps=5)
    assert lab.train() == []
    assert lab.core.n == 5


@pytest.mark.parametrize("advantage", ["group", "turn", "batch"])
def test_a_clean_run_of_forked_histories_raises_nothing(model_folder: Path, advantage: str) -> None:
    lab = Lab(model_folder, f"algo.advantage={advantage}")
    forked(lab)
    assert lab.train() == [] and lab.core.n == 3


def test_rewards_without_an_opinion_do_no_harm(model_folder: Path) -> None:
    """Of whole groups, and in the last step of a whole batch: nothing of them moves the weights or any mean."""

    class Unsure(Game):
        async def step(self, action: str, *, truncated: bool = False) -> Step:
            step = await super().step(action, truncated=truncated)
            return replace(step, reward=None) if self.task % 3 == 0 or lab.step == 2 else step

    lab = Lab(model_folder, "learner.weight_decay=0.0")
    lab.environment = Unsure
    seen = []
    minibatches = lab.trainer.minibatches

    def watched(batch_part: BatchPart) -> list[Minibatch]:
        seen.append((batch_part, minibatches(batch_part)))
        return seen[-1][1]

    vars(lab.trainer)["minibatches"] = watched
    assert lab.train() == [] and lab.core.n == 3

    for step, (batch_part, (minibatch,)) in enumerate(seen):
        masked = [row for row in batch_part.rows if row.unrewarded]
        assert len(masked) == 16 if step == 2 else 0 < len(masked) < 16
        trained = sum(row.loss_tokens for row in batch_part.rows if not row.unrewarded)
        assert minibatch.loss_tokens == sum(pack.loss_tokens for pack in minibatch.packs) == trained
        assert batch_part.metrics["reward/no_opinion"] == len(masked)
        assert ("rollout/reward" in batch_part.metrics) == (step < 2)
    assert all(torch.isfinite(tensor).all() for tensor in lab.trainer.policy.state_dict().values())


@pytest.mark.parametrize("alpha", [0, 1, 2])
def test_every_token_of_a_batch_is_compared_whatever_its_age(model_folder: Path, alpha: int) -> None:
    lab = Lab(model_folder, f"rollout.alpha={alpha}", "alarms.exact=1e-4", steps=4)
    assert lab.train() == []
    assert 0 < lab.metrics["exact/max"] < 1e-5
    assert lab.metrics["exact/tokens"] > 100 and lab.metrics["exact/unknown"] == 0

    plain = Lab(model_folder, f"rollout.alpha={alpha}", steps=4)
    plain.train()
    assert "exact/max" not in plain.metrics
    for name, tensor in plain.trainer.policy.state_dict().items():
        assert tensor.equal(lab.trainer.policy.state_dict()[name]), f"the comparison changed {name}"


def test_a_clean_resume_raises_nothing(model_folder: Path) -> None:
    first = Lab(model_folder, "rollout.alpha=1")
    assert first.train() == []
    lab = first.continued()
    assert lab.train() == [] and lab.core.n == 6
