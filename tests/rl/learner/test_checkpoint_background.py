"""Checkpoints that are written while training goes on: of the moment of the save, complete or not there at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from rl.learner import checkpoint
from rl.store.checkpoint_folder import Meta, latest, steps_of, verify
from rl.wire.process import WaitExpired
from tests.rl.learner.ranks import process_group, results_of_ranks
from tests.rl.learner.test_trainer_ranks import make_trainer, train, weights
from tests.rl.learner.tiny_policies import largest_difference, save_tiny

RANKS = 2
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tiny(tmp_path_factory.mktemp("background"))


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    with process_group(tmp_path) as made:
        yield made


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written before it is opened."""
    opened = threading.Event()
    write = FileSystemWriter.write_data

    def waiting(*arguments: Any) -> Any:
        assert opened.wait(60)
        return write(*arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", waiting)
    yield opened
    opened.set()


def test_training_goes_on_meanwhile_and_a_resume_is_of_the_moment_of_the_save(
    folder: Path, mesh: Any, gate: threading.Event, tmp_path: Path
) -> None:
    kept = tmp_path / "checkpoints"
    trainer = make_trainer(folder, "critic", mesh)
    background = checkpoint.Background(kept, deadline_s=60)
    train(trainer, 0)
    background.save(trainer.trained(), Meta(1, 0, 1), b"journal", keep=2)
    drawn = torch.rand(2)
    expected = [train(trainer, step) for step in range(1, STEPS)]
    background.look()  # asks nobody to wait
    assert latest(kept) is None and (kept / "step-1.tmp").exists()

    gate.set()
    background.wait()
    saved = latest(kept)
    assert saved is not None and verify(saved).step == 1
    other = make_trainer(folder, "critic", mesh)
    checkpoint.load(saved, other.trained())
    assert torch.equal(torch.rand(2), drawn)
    assert [train(other, step) for step in range(1, STEPS)] == expected
    assert largest_difference(weights(other), weights(trainer)) == 0


def test_one_is_written_at_a_time_and_a_wait_has_an_end(
    folder: Path, mesh: Any, gate: threading.Event, tmp_path: Path
) -> None:
    trainer = make_trainer(folder, "batch", mesh)
    background = checkpoint.Background(tmp_path / "checkpoints", deadline_s=0.2)
    background.save(trainer.trained(), Meta(1, 0, 1), b"", keep=2)
    with pytest.raises(WaitExpired, match=r"learner.0 waited 0.2 s for its checkpoint to be written"):
        background.save(trainer.trained(), Meta(2, 0, 1), b"", keep=2)
    assert not (tmp_path / "checkpoints" / "step-2.tmp").exists()


def test_what_goes_wrong_is_raised_by_the_next_look(
    folder: Path, mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "commit", full)
    trainer = make_trainer(folder, "batch", mesh)
    background = checkpoint.Background(tmp_path / "checkpoints", deadline_s=60)
    background.save(trainer.trained(), Meta(1, 0, 1), b"", keep=2)
    assert background._writing is not None and background._writing.exception(60) is not None
    with pytest.raises(OSError, match="No space left"):
        background.look()
    assert latest(tmp_path / "checkpoints") is None


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    with process_group(folder, rank, RANKS) as mesh:
        trainer = make_trainer(folder, "critic", mesh)
        background = checkpoint.Background(Path(folder) / "checkpoints", deadline_s=60)
        found: list[dict[str, Tensor]] = []
        for step in range(STEPS):
            train(trainer, step, rank, RANKS)
            background.save(trainer.trained(), Meta(step + 1, 0, RANKS), b"", keep=STEPS)
            found.append(weights(trainer))
        background.wait()
        torch.save({"weights": found}, f"{folder}/rank{rank}.pt")


def test_two_ranks_train_and_write_at_once(folder: Path, mesh: Any) -> None:
    """Each checkpoint has what the ranks held when it was asked for, whatever they did in the meantime."""
    ranks = results_of_ranks(rank_main, folder, RANKS)
    trainer = make_trainer(folder, "critic", mesh)
    for step, path in steps_of(folder / "checkpoints").items():
        checkpoint.load(path, trainer.trained())
        assert largest_difference(weights(trainer), ranks[0]["weights"][step - 1]) == 0
    assert [*steps_of(folder / "checkpoints")] == [*range(1, STEPS + 1)]
