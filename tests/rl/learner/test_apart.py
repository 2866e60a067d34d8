"""Ranks with folders of their own: a checkpoint is whole in that of rank 0, and any number of ranks can load it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl.learner import checkpoint
from rl.learner.apart import bring_out, ranks_apart
from rl.store.checkpoint_folder import Meta, latest, verify
from tests.rl.learner.ranks import process_group, results_of_ranks
from tests.rl.learner.test_trainer_ranks import make_trainer, train, weights
from tests.rl.learner.tiny_policies import largest_difference, save_tiny

RANKS = 3
HOMES = ("a", "b", "b")
"""The machine of each rank."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny(tmp_path_factory.mktemp("apart"))


def _save(rank: int, where: str) -> None:
    folder = Path(where)
    home = folder / HOMES[rank]
    torch.set_num_threads(1)
    with process_group(folder, rank, RANKS) as mesh:
        apart = ranks_apart(home)
        trainer = make_trainer(folder / "model", "batch", mesh)
        train(trainer, 0)
        checkpoint.save(home / "checkpoints", trainer.trained(), Meta(1, 0, RANKS), b"journal", 2, apart)
        background = checkpoint.Background(home / "checkpoints", 60, apart)
        background.save(trainer.trained(), Meta(2, 0, RANKS), b"journal", 2)
        background.wait()
        if rank == 0:
            (home / "told").write_text("what rank 0 knows")
        bring_out(home / "told", apart)
        told = (home / "told").read_text()
        torch.save({"apart": apart, "told": told, "weights": weights(trainer)}, folder / f"rank{rank}.pt")


def test_what_ranks_elsewhere_have_written_is_brought_to_rank_0(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(folder)
    results = results_of_ranks(_save, tmp_path, RANKS)
    assert [each["apart"] for each in results] == [[1, 2]] * RANKS
    assert [each["told"] for each in results] == ["what rank 0 knows"] * RANKS
    assert [path.name for path in (tmp_path / "b").rglob("*") if path.is_file()] == ["told"], "nothing else is left"

    for step in (1, 2):
        saved = tmp_path / "a" / "checkpoints" / f"step-{step}"
        assert verify(saved).step == step
        written = {path.name.split("_")[2] for path in (saved / "state").glob("__*")}
        assert written == {"0", "1", "2"}, "there is a part of each rank"

    newest = latest(tmp_path / "a" / "checkpoints")
    assert newest is not None
    with process_group(tmp_path / "b") as mesh:
        other = make_trainer(folder, "batch", mesh)
        checkpoint.load(newest, other.trained())
        assert largest_difference(weights(other), results[0]["weights"]) == 0
