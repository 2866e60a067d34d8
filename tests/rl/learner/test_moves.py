"""`placement=alternate`: what moves to the host and back trains what stays, to the last bit, and can be read there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rl.config.schema import load_config
from rl.learner import checkpoint
from rl.learner.tensor_digests import tensor_digests
from rl.learner.trainer import Trainer
from rl.models import compiled, loading
from rl.models.loading import copy_of
from rl.models.protocol import local
from rl.store.checkpoint_folder import Meta
from tests.rl.learner.ranks import process_group, results_of_ranks
from tests.rl.learner.test_trainer_ranks import SETTINGS, VARIANTS, train, weights
from tests.rl.learner.tiny_policies import largest_difference, save_tiny

RANKS = 2
STEPS = 3
SEVERAL = {name: VARIANTS[name] for name in ("critic", "lora", "turns")} | {
    "bfloat16": (*VARIANTS["batch"], "model.dtype=bfloat16"),
    "adapters that go on": (*VARIANTS["lora"], "model.dtype=bfloat16", "algo.kl.reference=start"),
}


def make_trainer(
    folder: Path | str, settings: tuple[str, ...], placement: str, mesh: Any = None, device: str = "cpu"
) -> Trainer:
    overrides = [*SETTINGS, *settings, "learner.max_tokens_per_pack=24", f"placement={placement}"]
    config = load_config(None, overrides)
    return Trainer(config, Path(folder), last_step=STEPS, mesh=mesh, device=device, at_rest=config.alternates)


def held(trainer: Trainer) -> list[Tensor]:
    """This rank's rows of all that a step reads: parameters of every model, and moments."""
    models = [each for each in (trainer.policy, trainer.reference, trainer.critic) if isinstance(each, torch.nn.Module)]
    states = [state for _, adamw in trainer.trained().values() for state in adamw.state.values()]
    moments = [each for state in states for each in state.values() if isinstance(each, Tensor)]
    return [local(each) for each in [*(each for model in models for each in model.parameters()), *moments]]


def move(trainer: Trainer, to: str) -> None:
    """And spoil what was there before: whoever still reads it is found out."""
    before = held(trainer)
    trainer.moves.to_device() if to == "device" else trainer.moves.to_host()
    for each in before:
        each.fill_(torch.nan)


def steps(trainer: Trainer, rank: int = 0, ranks: int = 1) -> Iterator[dict[str, float]]:
    alternates = trainer.config.alternates
    for step in range(STEPS):
        if alternates:
            move(trainer, "device")
        yield train(trainer, step, rank, ranks)
        if alternates:
            move(trainer, "host")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny(tmp_path_factory.mktemp("moves"))


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    with process_group(tmp_path) as made:
        yield made


def compared(folder: Path, variant: str, mesh: Any = None) -> None:
    still, moved = (make_trainer(folder, SEVERAL[variant], placement, mesh) for placement in ("shared", "alternate"))
    parameters = [*moved.policy.parameters()]
    for expected, found in zip(steps(still), steps(moved), strict=True):
        assert found == expected

    assert all(each is before for each, before in zip(moved.policy.parameters(), parameters, strict=True))
    assert largest_difference(weights(moved), weights(still)) == 0
    digests = [tensor_digests(each.weights.trainable()) for each in (still, moved)]
    assert digests[0] == digests[1]


def test_a_single_rank_without_a_mesh(folder: Path) -> None:
    compared(folder, "critic")


@pytest.mark.parametrize("variant", SEVERAL)
def test_one_rank_is_equal_to_the_last_bit(folder: Path, mesh: Any, variant: str) -> None:
    compared(folder, variant, mesh)


def compiled_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    compiled.BACKEND = "aot_eager"
    settings = (*SEVERAL["adapters that go on"], "learner.compile=true")
    with torch._dynamo.config.patch(disable=False):
        found = {each: [*steps(make_trainer(folder, settings, each))] for each in ("alternate", "shared")}
    torch.save(found, f"{folder}/rank{rank}.pt")


def test_what_is_compiled_moves_as_well(folder: Path) -> None:
    """Compiled code knows of the parameters that it was compiled with first, which therefore cannot become others."""
    (found,) = results_of_ranks(compiled_main, folder, 1)
    assert found["alternate"] == found["shared"]


def test_a_tied_embedding_is_copied_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a second copy would be to pages that are not locked, from what the first one had only begun."""
    trainer = make_trainer(folder, VARIANTS["batch"], "alternate")
    assert trainer.policy.model.config.tie_word_embeddings
    copies: list[Tensor] = []

    def counted(tensor: Tensor, *given: Any) -> Tensor:
        copies.append(tensor)
        return copy_of(tensor, *given)

    monkeypatch.setattr(loading, "copy_of", counted)
    trainer.moves.to_device()
    assert len({id(each) for each in copies}) == len(copies) > 10


def test_what_is_at_rest_is_saved_and_loaded_in_place(folder: Path, mesh: Any, tmp_path: Path) -> None:
    """As an undo does, and a resume, which loads before the first turn."""
    moved = make_trainer(folder, SEVERAL["critic"], "alternate", mesh)
    metrics = []
    for step, found in enumerate(steps(moved)):
        metrics.append(found)
        if step == 1:
            trainer_at_rest(moved, tmp_path)
    ended = weights(moved)

    for trainer in (moved, make_trainer(folder, SEVERAL["critic"], "alternate", mesh)):
        checkpoint.load(tmp_path / "step-2", trainer.trained())
        move(trainer, "device")
        assert train(trainer, 2) == metrics[2]
        assert largest_difference(weights(trainer), ended) == 0


def trainer_at_rest(trainer: Trainer, folder: Path) -> None:
    """Saved while it rests, between two of its turns."""
    move(trainer, "host")
    checkpoint.save(folder, trainer.trained(), Meta(2, 0, 1), b"", keep=1)
    move(trainer, "device")


def test_states_on_the_host_do_not_move(folder: Path, mesh: Any) -> None:
    trainer = make_trainer(folder, (*SEVERAL["bfloat16"], "learner.optimizer_states=host"), "alternate", mesh)
    train(trainer, 0)
    before = [each.data_ptr() for each in held(trainer)]
    trainer.moves.to_host()
    trainer.moves.to_device()
    assert [each.data_ptr() for each in held(trainer)] == before


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    found = {}
    with process_group(folder, rank, RANKS) as mesh:
        for variant in ("critic", "bfloat16"):
            for placement in ("shared", "alternate"):
                trainer = make_trainer(folder, SEVERAL[variant], placement, mesh)
                metrics = [*steps(trainer, rank, RANKS)]
                found[f"{variant}, {placement}"] = (metrics, weights(trainer))
        torch.save(found, f"{folder}/rank{rank}.pt")


def test_two_ranks_are_equal_to_the_last_bit(folder: Path) -> None:
    for rank in results_of_ranks(rank_main, folder, RANKS):
        for variant in ("critic", "bfloat16"):
            moved, still = (rank[f"{variant}, {placement}"] for placement in ("alternate", "shared"))
            assert moved[0] == still[0]
            assert largest_difference(moved[1], still[1]) == 0
