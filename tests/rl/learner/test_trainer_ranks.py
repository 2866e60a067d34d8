"""Whatever the algorithm, two ranks train what one does; a checkpoint of critic and policy continues exactly."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rl.config.schema import load_config
from rl.learner import checkpoint
from rl.learner.trainer import Trainer
from rl.learner.update import UpdateStats
from rl.store.checkpoint_folder import CheckpointError, Meta
from rl.wire.messages import BatchPart
from tests.rl.learner.learner_harness import make_batch
from tests.rl.learner.ranks import process_group, results_of_ranks
from tests.rl.learner.tiny_policies import VOCAB, largest_difference, save_tiny

RANKS = 2
STEPS = 3
SETTINGS = (
    "model.dtype=float32",
    "sampling.temperature=0.7",
    "sampling.max_tokens=8",
    "env.max_turns=2",
    "learner.lr=1e-2",
    "learner.eps=1e-3",
    "rollout.groups_per_batch=4",
    "rollout.group_size=2",
)
VARIANTS = {
    "critic": (
        "algo.loss=ppo",
        "algo.advantage={gae: {lam: 0.9}}",
        "learner.minibatches=2",
        "algo.critic={lr: 1e-2, lam: 0.95, clip: 0.3, epochs: 2}",
        "algo.aggregation=sequence",
        "algo.kl={coef: 0.05, place: reward, estimator: k1}",
        "algo.mask_truncated=true",
    ),
    "turns": (
        "algo.advantage=turn",
        "algo.aggregation=constant",
        "algo.entropy_coef=0.01",
        "algo.loss=decoupled_ppo",
        "algo.kl={coef: 0.05, place: loss, estimator: k3}",
        "algo.shaping=[overlong]",
    ),
    "batch": ("algo.advantage=batch", "algo.kl={coef: 0.1, place: reward, estimator: k3}", "learner.minibatches=2"),
    "leave_one_out": (
        "algo.advantage=leave_one_out",
        "algo.aggregation=sequence",
        "algo.kl={coef: 0.1, place: reward, estimator: k1}",
    ),
    "corrected": (
        "algo.loss=gspo",
        "algo.correction={weight: token, cap: 1.05, mask: geometric, low: 0.9, high: 1.1}",
        "learner.minibatches=2",
    ),
    "m2po": ("algo.loss=m2po", "algo.options={threshold: 0.001}"),
    "lora": (
        "model.lora={rank: 4, alpha: 8}",
        "algo.kl={coef: 0.05, place: reward, estimator: k3}",
        "learner.minibatches=2",
    ),
    "lora beside a critic": (
        "model.lora={rank: 2, targets: [q_proj, down_proj]}",
        "algo.loss=ppo",
        "algo.advantage=gae",
        "algo.critic={lr: 1e-2}",
    ),
    "topr": ("algo.loss=topr", "algo.correction={weight: sequence, cap: 1.2}"),
}


def batch_part_of(step: int, rank: int, ranks: int) -> BatchPart:
    """Two-turn samples rewarded by turn, two of eight cut; the members of a group are on different ranks."""
    (whole,) = make_batch(step, vocab=VOCAB, version=max(0, step - 1))
    rows = [
        msgspec.structs.replace(
            row, turn_rewards=[0.5 * (i % 3), row.reward], reward=row.reward + 0.5 * (i % 3), truncated=i % 4 == 1
        )
        for i, row in enumerate(whole.rows)
    ]

    members = list(range(rank, len(rows), ranks))
    own = np.repeat([i in members for i in range(len(rows))], whole.lengths)
    return msgspec.structs.replace(
        whole,
        rank=rank,
        rows=rows,
        members=members,
        lengths=[whole.lengths[i] for i in members],
        turn_starts=[whole.turn_starts[i] for i in members],
        columns={name: values[own] for name, values in whole.columns.items()},
    )


def make_trainer(folder: str | Path, variant: str, mesh: Any = None, max_tokens: int = 48) -> Trainer:
    config = load_config(None, [*SETTINGS, *VARIANTS[variant], f"learner.max_tokens_per_pack={max_tokens}"])
    return Trainer(config, Path(folder), last_step=STEPS, mesh=mesh)


def train(trainer: Trainer, step: int, rank: int = 0, ranks: int = 1) -> dict[str, float]:
    stats = UpdateStats()
    for minibatch in trainer.minibatches(batch_part_of(step, rank, ranks)):
        stats.add(trainer.update(minibatch, step))
    stats.all_reduce()
    return stats.metrics()


def weights(trainer: Trainer) -> dict[str, Tensor]:
    found = {}
    for name, (model, _) in trainer.trained().items():
        for key, parameter in model.named_parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            found[f"{name}.{key}"] = whole.detach().clone()
    return found


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    results = {}
    with process_group(folder, rank, RANKS) as mesh:
        for variant in VARIANTS:
            # The packs of the ranks differ, too.
            trainer = make_trainer(folder, variant, mesh, max_tokens=(24, 200)[rank])
            metrics = []
            for step in range(STEPS):
                metrics.append(train(trainer, step, rank, RANKS))
                if step == STEPS - 2:
                    checkpoint.save(Path(folder) / variant, trainer.trained(), Meta(step + 1, 0, RANKS), b"", keep=1)
            results[variant] = (metrics, weights(trainer))

        torch.save(results, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return results_of_ranks(rank_main, folder, RANKS)


def smooth(metrics: dict[str, float]) -> dict[str, float]:
    """Without quantiles, which step from bin to bin."""
    return {name: value for name, value in metrics.items() if "ratio_p" not in name}


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_equal_one(folder: Path, ranks: list[dict[str, Any]], variant: str) -> None:
    trainer = make_trainer(folder, variant)
    expected = [train(trainer, step) for step in range(STEPS)]
    assert ranks[0][variant][0] == ranks[1][variant][0]  # every rank knows the same numbers
    metrics, found = ranks[0][variant]
    for step in range(STEPS):
        assert smooth(metrics[step]) == pytest.approx(smooth(expected[step]), rel=2e-4, abs=2e-5)
    assert largest_difference(found, weights(trainer)) < 3e-5
    assert ("critic.head.weight" in found) == ("critic" in variant)
    assert ("loss/kl_reference" in metrics[0]) == any("algo.kl" in one for one in VARIANTS[variant])


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    with process_group(tmp_path) as mesh:
        yield mesh


@pytest.mark.parametrize("variant", ["critic", "lora"])
def test_one_rank_continues_what_two_saved(
    folder: Path, ranks: list[dict[str, Any]], one_rank: Any, variant: str
) -> None:
    """Last step from the checkpoint before it: the same as without the interruption, on another number of ranks."""
    trainer = make_trainer(folder, variant, one_rank)
    checkpoint.load(folder / variant / f"step-{STEPS - 1}", trainer.trained())
    metrics = train(trainer, STEPS - 1)
    expected, uninterrupted = ranks[0][variant]
    assert smooth(metrics) == pytest.approx(smooth(expected[-1]), rel=1e-4, abs=1e-5)
    assert largest_difference(weights(trainer), uninterrupted) < 2e-6


def test_a_checkpoint_without_critic_is_refused_where_one_is_needed(
    folder: Path, ranks: list[dict[str, Any]], one_rank: Any, tmp_path: Path
) -> None:
    saved = folder / "batch" / f"step-{STEPS - 1}"
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*critic") as raised:
        checkpoint.load(saved, make_trainer(folder, "critic", one_rank).trained())
    assert "\n" not in str(raised.value)
    checkpoint.load(
        folder / "critic" / saved.name, make_trainer(folder, "batch", one_rank).trained()
    )  # may be left out


def test_a_checkpoint_of_adapters_has_nothing_else_and_is_none_of_a_whole_model(
    folder: Path, ranks: list[dict[str, Any]], one_rank: Any
) -> None:
    saved = folder / "lora" / f"step-{STEPS - 1}"
    entries = checkpoint.IndexReader(saved / "state").read_metadata().state_dict_metadata
    weights = [name for name in entries if name.startswith("policy.model.")]
    assert len(weights) == 2 * 7 * 2 and all(name.endswith(("lora_A", "lora_B")) for name in weights)
    for variant, other in (("lora", "batch"), ("batch", "lora")):
        with pytest.raises(CheckpointError, match=r"cannot be loaded: .*[Mm]issing key.* policy\.model\."):
            checkpoint.load(folder / other / saved.name, make_trainer(folder, variant, one_rank).trained())


def test_models_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    def trainer(*overrides: str) -> Trainer:
        return Trainer(load_config(None, [*SETTINGS, *overrides]), folder, last_step=1)

    with pytest.raises(ValueError, match=r"algo\.kl\.reference='.*' is never used with algo\.kl\.coef=0"):
        trainer(f"algo.kl.reference={folder}")
    other = tmp_path / "other"
    shutil.copytree(folder, other, ignore=lambda where, names: [n for n in names if n.endswith(".pt") or "." not in n])
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace(f'"vocab_size": {VOCAB}', '"vocab_size": 40'))
    (other / "model.safetensors").unlink()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    Qwen3ForCausalLM(Qwen3Config.from_pretrained(other)).save_pretrained(other)
    with pytest.raises(ValueError, match=r"algo\.critic\.path: a vocabulary of 40 entries, the policy has 67"):
        trainer("algo.advantage=gae", f"algo.critic={{path: {other}}}")


def test_a_reference_of_another_folder_is_the_one_that_is_used(folder: Path, tmp_path: Path) -> None:
    """The divergence of the first batch is 0 from the starting weights, and not from others."""

    def divergence(*overrides: str) -> float:
        config = load_config(None, [*SETTINGS, "algo.kl.coef=0.1", *overrides])
        return train(Trainer(config, folder, last_step=1), 0)["loss/kl_reference"]

    assert divergence() == pytest.approx(0, abs=1e-9)
    moved = make_trainer(folder, "batch")
    train(moved, 0)
    moved.policy.model.save_pretrained(tmp_path)
    assert divergence(f"algo.kl.reference={tmp_path}") > 1e-4


@pytest.mark.parametrize(("variant", "forwards_per_pack"), [("topr", 1), ("corrected", 2)])
def test_with_one_minibatch_the_proximal_policy_costs_no_forward(
    folder: Path, variant: str, forwards_per_pack: int
) -> None:
    trainer = make_trainer(folder, variant)
    calls = []
    trainer.policy.register_forward_pre_hook(lambda *_: calls.append(1))
    minibatches = trainer.minibatches(batch_part_of(0, 0, 1))
    for minibatch in minibatches:
        trainer.update(minibatch, 0)
    assert len(calls) == forwards_per_pack * sum(len(minibatch.packs) for minibatch in minibatches)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("variant", ["critic", "lora"])
def test_every_layer_tells_that_it_begins_in_a_forward_and_in_a_backward(
    variant: str, recompute: bool, folder: Path
) -> None:
    """So that one long sample, which computes for minutes, is no hang."""
    told = []
    config = load_config(
        None, [*SETTINGS, *VARIANTS[variant], f"learner.activation_checkpointing={str(recompute).lower()}"]
    )
    trainer = Trainer(
        config,
        folder,
        last_step=STEPS,
        before_forward=lambda *_: told.append("forward"),
        before_layer=lambda *_: told.append("layer"),
    )
    (minibatch, *_) = trainer.minibatches(batch_part_of(0, 0, 1))
    forwards = told.count("forward")
    layers = told.count("layer")
    assert layers == 2 * forwards, "what is computed without gradients"

    trainer.update(minibatch, 0)
    forwards = told.count("forward") - forwards
    layers = told.count("layer") - layers
    assert forwards > 0 and layers == (6 if recompute else 4) * forwards, "again where it is computed again"
