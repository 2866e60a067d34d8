"""Runs without a fault raise no alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.museum.faults import forked
from tests.museum.lab import Lab

CLEAN = {
    "synchronous": [],
    "asynchronous": ["rollout.alpha=1"],
    "minibatches": ["learner.minibatches=2", "rollout.alpha=1"],
    "reference": ["algo.kl.coef=0.1"],
    "decayed": ["learner.schedule=cosine", "learner.warmup_steps=1"],
    "exact": ["rollout.alpha=1", "alarms.exact=1e-4"],
    "exact minibatches": ["rollout.alpha=2", "learner.minibatches=2", "alarms.exact=1e-4"],
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
