"""A learner process with critic and reference, interrupted after two steps, publishes what a whole one does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rl.config.schema import load_config
from rl.learner.trainer import Trainer
from rl.learner.update import UpdateStats
from rl.wire.messages import BatchPart
from tests.conftest import save_run
from tests.rl.learner.learner_harness import make_batch
from tests.rl.learner.test_training import largest_difference, run_learner
from tests.rl.learner.tiny_policies import VOCAB, save_tiny

SETTINGS = (
    "learner.kind=fsdp",
    "model.dtype=float32",
    "generator.dtype=float32",
    "learner.lr=1e-2",
    "learner.eps=1e-3",
    "rollout.groups_per_batch=4",
    "rollout.group_size=2",
    "algo.loss=ppo",
    "algo.advantage=gae",
    "algo.critic={lr: 1e-2}",
    "algo.kl.coef=0.05",
    "weights.probe=false",
)


def batches(first: int, last: int, timeline: int = 0) -> list[list[BatchPart]]:
    return [make_batch(step, vocab=VOCAB, version=max(0, step - 1), timeline=timeline) for step in range(first, last)]


def test_a_resumed_learner_has_its_critic_back(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    trainer = Trainer(load_config(None, list(SETTINGS)), folder, last_step=3)
    expected = []
    for (batch_part,) in batches(0, 3):
        stats = UpdateStats()
        for minibatch in trainer.minibatches(batch_part):
            stats.add(trainer.update(minibatch, batch_part.step))
        expected.append(stats.metrics())

    run = save_run(*SETTINGS, "steps=2", model_folder=folder)
    rows = run_learner(run, batches(0, 2)).rows
    resume = f"resume={run.folder / 'checkpoints' / 'step-2'}"
    again = save_run(*SETTINGS, "steps=3", resume, model_folder=folder, timeline=1, start_step=2)
    resumed = run_learner(again, batches(2, 3, timeline=1))
    for one in (run, again):
        shutil.rmtree(one.folder)

    for row, values in zip([*rows, *resumed.rows], expected, strict=True):
        assert {"critic/loss", "critic/grad_norm", "critic/explained_variance", "loss/kl_reference"} <= values.keys()
        assert {name: row.values[name] for name in values} == pytest.approx(values, rel=1e-4, abs=1e-5)
    plain = {name: parameter.detach() for name, parameter in trainer.policy.model.named_parameters()}
    wire = {name: tensor for name, tensor in resumed.wire.items() if name in plain}
    assert largest_difference(wire, plain) < 2e-5
