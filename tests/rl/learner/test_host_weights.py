"""`learner.optimizer_states=host` trains what `device` trains, to the last bit wherever it adds up the same numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl.config.schema import load_config
from rl.learner import checkpoint
from rl.learner.host_weights import HostWeights
from rl.learner.tensor_digests import tensor_digests
from rl.learner.trainer import Trainer
from rl.models.protocol import local
from rl.models.team import make_mesh
from rl.store.checkpoint_folder import Meta
from rl.wire.page_lock import PageLock
from tests.rl.learner.ranks import process_group, results_of_ranks
from tests.rl.learner.test_trainer_ranks import SETTINGS, VARIANTS, train, weights
from tests.rl.learner.tiny_policies import largest_difference, save_tiny

RANKS = 2
STEPS = 3
PLACES = ("device", "host")
SEVERAL = {
    "critic": VARIANTS["critic"],
    "lora": VARIANTS["lora"],
    "turns": VARIANTS["turns"],
    "copies": (*VARIANTS["batch"], "learner.ranks=2", "learner.copies=2"),
    "bfloat16": (*VARIANTS["batch"], "model.dtype=bfloat16"),
    "added up in bfloat16": (*VARIANTS["batch"], "model.dtype=bfloat16", "learner.reduce_dtype=bfloat16"),
}
ONE = SEVERAL | {"lora in bfloat16": (*VARIANTS["lora"], "model.dtype=bfloat16", "algo.kl.reference=start")}


def make_trainer(folder: Path | str, settings: tuple[str, ...], place: str, mesh: Any = None) -> Trainer:
    """Packs of 24 tokens, so that a step adds up several."""
    overrides = [*SETTINGS, *settings, "learner.max_tokens_per_pack=24", f"learner.optimizer_states={place}"]
    return Trainer(load_config(None, overrides), Path(folder), last_step=STEPS, mesh=mesh)


def trained(trainer: Trainer) -> dict[str, Tensor]:
    """What an optimizer moves, whole and in float32."""
    named = weights(trainer)
    found = {name: each.requires_grad for name, each in _named(trainer)}
    return {name: tensor for name, tensor in named.items() if found[name]}


def _named(trainer: Trainer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for owner, (model, _) in trainer.trained().items():
        yield from ((f"{owner}.{name}", each) for name, each in model.named_parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny(tmp_path_factory.mktemp("host"))


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    with process_group(tmp_path) as made:
        yield made


def test_a_single_rank_without_a_mesh(folder: Path) -> None:
    found = {}
    for place in PLACES:
        trainer = make_trainer(folder, VARIANTS["critic"], place)
        found[place] = ([train(trainer, step) for step in range(STEPS)], weights(trainer))
    assert found["host"][0] == found["device"][0]
    assert found["host"][1].keys() == found["device"][1].keys()
    assert largest_difference(found["host"][1], found["device"][1]) == 0


@pytest.mark.parametrize("variant", [name for name in ONE if name not in ("copies", "added up in bfloat16")])
def test_one_rank_is_equal_to_the_last_bit(folder: Path, mesh: Any, variant: str) -> None:
    """Metrics, float32 weights, and the digests that a replay compares; the forward has their rounded copies."""
    trainers = {place: make_trainer(folder, ONE[variant], place, mesh) for place in PLACES}
    for step in range(STEPS):
        metrics = [train(trainer, step) for trainer in trainers.values()]
        assert metrics[0] == metrics[1]

    device, host = trainers.values()
    assert largest_difference(trained(host), trained(device)) == 0
    digests = [tensor_digests(trainer.weights.trainable()) for trainer in (device, host)]
    assert digests[0] == digests[1]
    assert isinstance(host.weights, HostWeights) and all(
        each.dtype == torch.float32 for each in host.weights.parameters()
    )
    for name, each in host.weights.trainable():
        copy = host.policy.get_parameter(name)
        assert torch.equal(local(copy), local(each).to(copy.dtype)) and local(copy).data_ptr() != local(each).data_ptr()
        assert copy.dtype == (torch.bfloat16 if variant == "bfloat16" else torch.float32)


def first_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Those of the policy's first step, once it is made, of this rank's rows."""
    found: dict[str, Tensor] = {}

    def keep(*_: Any) -> None:
        if not found:
            found.update(
                {name: local(each.grad).clone() for name, each in trainer.weights.trainable() if each.grad is not None}
            )

    trainer.optimizer.adamw.register_step_pre_hook(keep)
    return found


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    found = {}
    with process_group(folder, rank, RANKS) as mesh:
        for variant, place in itertools.product(SEVERAL, PLACES):
            placed = make_mesh(load_config(None, [*SEVERAL[variant]]), "cpu", RANKS) if variant == "copies" else mesh
            trainer = make_trainer(folder, SEVERAL[variant], place, placed)
            metrics: list[dict[str, float]] = []
            gradients = first_gradients(trainer)
            for step in range(STEPS):
                metrics.append(train(trainer, step, rank, RANKS))
                if step == 0:
                    meta = Meta(step + 1, 0, RANKS)
                    checkpoint.save(Path(folder) / f"{variant}, {place}", trainer.trained(), meta, b"", keep=1)
            found[variant, place] = (metrics, trained(trainer), gradients)
        torch.save(found, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[Any, Any]]:
    return results_of_ranks(rank_main, folder, RANKS)


@pytest.mark.parametrize("variant", ["critic", "lora", "turns", "copies"])
def test_two_ranks_are_equal_to_the_last_bit(ranks: list[dict[Any, Any]], variant: str) -> None:
    for rank in ranks:
        assert rank[variant, "host"][0] == rank[variant, "device"][0]
        assert largest_difference(rank[variant, "host"][1], rank[variant, "device"][1]) == 0


@pytest.mark.parametrize("variant", ["bfloat16", "added up in bfloat16"])
def test_below_float32_several_ranks_round_the_sum_of_each_pack(ranks: list[dict[Any, Any]], variant: str) -> None:
    """Of the first step's gradients, which are of the same weights, within the precision of bfloat16."""
    host, device = (ranks[0][variant, place][2] for place in ("host", "device"))
    for name, gradient in device.items():
        gap, most = (host[name] - gradient).abs().max(), gradient.abs().max()
        assert gap <= most * 2**-8 and (gap > 0) == (most > 0), name


@pytest.mark.parametrize("variant", ["critic", "lora"])
@pytest.mark.parametrize(("saved", "goes_on"), [PLACES, PLACES[::-1]])
def test_each_goes_on_with_what_the_other_saved(
    folder: Path, ranks: list[dict[Any, Any]], mesh: Any, variant: str, saved: str, goes_on: str
) -> None:
    """With its moments, on another number of ranks, and after it has gone another way, as an undo has."""
    trainer = make_trainer(folder, SEVERAL[variant], goes_on, mesh)
    train(trainer, 5)
    checkpoint.load(folder / f"{variant}, {saved}" / "step-1", trainer.trained())
    for step in range(1, STEPS):
        train(trainer, step)
    assert largest_difference(trained(trainer), ranks[0][variant, saved][1]) < 2e-6


def test_weights_that_are_loaded_reach_the_forward_at_once(
    folder: Path, ranks: list[dict[Any, Any]], mesh: Any
) -> None:
    """The first version of a resume is published before any step."""
    trainer = make_trainer(folder, SEVERAL["bfloat16"], "host", mesh)
    before = {name: local(each).clone() for name, each in trainer.policy.named_parameters()}
    checkpoint.load(folder / "bfloat16, device" / "step-1", trainer.trained())
    for name, each in trainer.weights.trainable():
        copy = local(trainer.policy.get_parameter(name))
        assert torch.equal(copy, local(each).bfloat16()) and not torch.equal(copy, before[name])


def test_what_crosses_the_bus_is_page_locked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight and each place for a gradient, once: moments stay where they are."""
    locked: list[int] = []
    monkeypatch.setattr(PageLock, "add", lambda _, view: locked.append(np.frombuffer(view, np.uint8).nbytes))
    trainer = make_trainer(folder, VARIANTS["batch"], "host")
    held = sum(each.nbytes for each in trained(trainer).values())
    assert sum(locked) == held
    for step in range(STEPS):
        train(trainer, step)
    assert sum(locked) == 2 * held


def test_a_gradient_that_is_not_finite_moves_nothing(folder: Path) -> None:
    trainer = make_trainer(folder, VARIANTS["batch"], "host")
    before = trained(trainer)
    for _, parameter in trainer.policy.trainable():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with pytest.raises(FloatingPointError, match="step 7"):
        trainer.optimizer.step(7)
    assert largest_difference(trained(trainer), before) == 0
