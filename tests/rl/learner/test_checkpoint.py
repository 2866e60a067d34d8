"""Checkpoints: atomic folders, exact restoration, and one clear error for whatever is missing or damaged."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from rl.learner import checkpoint
from rl.models.policy import Policy
from rl.store.checkpoint_folder import CheckpointError, Meta, begin, commit, latest, read_journal, read_meta
from rl.store.digests import DIGESTS, damage
from tests.rl.learner.tiny_policies import save_tiny


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
    yield
    dist.destroy_process_group()


def trained_model(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    fully_shard(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(steps):
        step(model, adamw)
    return model, adamw


def step(model: nn.Module, adamw: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 4)).square().sum().backward()
    adamw.step()
    adamw.zero_grad()


def values(model: nn.Module) -> list[torch.Tensor]:
    parameters: Iterator[Any] = model.parameters()
    return [parameter.full_tensor().detach().clone() for parameter in parameters]


def test_model_optimizer_and_rng_continue_exactly(one_rank: None, tmp_path: Path) -> None:
    model, adamw = trained_model(seed=0)
    checkpoint.save(tmp_path / "c", {"policy": (model, adamw)}, Meta(2, 0, 1), b"journal", keep=1)
    drawn = torch.rand(3)
    for _ in range(3):
        step(model, adamw)

    other, other_adamw = trained_model(seed=1, steps=0)
    other_adamw.param_groups[0]["lr"] = 0.1  # the resumed run's configuration, not the checkpoint's, decides
    saved = latest(tmp_path / "c")
    assert saved is not None and saved.name == "step-2"
    assert checkpoint.load(saved, {"policy": (other, other_adamw)}) == Meta(2, 0, 1)
    assert torch.equal(torch.rand(3), drawn)
    for _ in range(3):
        step(other, other_adamw)
    for mine, theirs in zip(values(model), values(other), strict=True):
        assert torch.equal(mine, theirs)


def test_hyperparameters_come_from_the_configuration(one_rank: None, tmp_path: Path) -> None:
    model, adamw = trained_model(seed=0)
    checkpoint.save(tmp_path, {"policy": (model, adamw)}, Meta(2, 0, 1), b"", keep=1)
    before = copy.deepcopy(adamw.state_dict()["param_groups"])
    adamw.param_groups[0].update(lr=0.5, weight_decay=0.25)
    checkpoint.load(tmp_path / "step-2", {"policy": (model, adamw)})
    assert adamw.param_groups[0]["lr"] == 0.5 and adamw.param_groups[0]["weight_decay"] == 0.25
    assert before[0]["lr"] == 0.1


@pytest.mark.parametrize("damage", ["truncated", "state missing", "other model"])
def test_damage_is_one_clear_error(one_rank: None, tmp_path: Path, damage: str) -> None:
    model, adamw = trained_model(seed=0)
    checkpoint.save(tmp_path, {"policy": (model, adamw)}, Meta(2, 0, 1), b"", keep=1)
    data = next((tmp_path / "step-2" / "state").glob("*.distcp"))
    if damage == "truncated":
        data.write_bytes(data.read_bytes()[:100])
    elif damage == "state missing":
        (tmp_path / "step-2" / "state" / ".metadata").unlink()
    else:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        adamw = torch.optim.AdamW(model.parameters())

    with pytest.raises(CheckpointError, match=r"step-2 cannot be loaded: .") as raised:
        checkpoint.load(tmp_path / "step-2", {"policy": (model, adamw)})
    assert "\n" not in str(raised.value)


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere is not a complete checkpoint \(no meta.json\)"):
        read_meta(tmp_path / "nowhere")
    (tmp_path / "meta.json").write_text('{"step": 1}')
    with pytest.raises(CheckpointError, match=r"meta.json cannot be read"):
        read_meta(tmp_path)
    with pytest.raises(CheckpointError, match="has no broker journal"):
        read_journal(tmp_path)


def test_an_interrupted_save_is_never_seen_and_the_newest_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        begin(tmp_path, number)
        commit(tmp_path, Meta(number, 0, 1), f"journal {number}".encode(), keep=2)
    for name in ("step-2-best", "step-10.bak", "step-"):  # a user's own, which stays
        shutil.copytree(tmp_path / "step-10", tmp_path / name)
    partial = begin(tmp_path, 11)
    (partial / "meta.json").write_text("{}")  # everything was written but the rename did not happen
    newest = latest(tmp_path)
    assert newest is not None and newest.name == "step-10"
    assert read_meta(newest) == Meta(10, 0, 1) and read_journal(newest) == b"journal 10"
    mine = ["step-", "step-10.bak", "step-2-best"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["step-10", "step-11.tmp", "step-2", *mine])
    assert not list(begin(tmp_path, 11).iterdir())  # the next attempt starts from nothing
    assert latest(tmp_path / "empty") is None


@pytest.mark.parametrize("file_bytes, files", [(1 << 30, 1), (20_000, 5)])
def test_an_export_loads_elsewhere_in_one_file_or_many(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int, files: int
) -> None:
    monkeypatch.setattr(checkpoint, "_MODEL_FILE_BYTES", file_bytes)
    policy = Policy.load(save_tiny(tmp_path / "source"))
    checkpoint.export_hf(policy, tmp_path / "model", tmp_path / "source", {"README.md": "card"})

    found = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(found) >= files and (tmp_path / "model" / "model.safetensors.index.json").exists() == (files > 1)
    exported = Policy.load(tmp_path / "model")
    for mine, theirs in zip(policy.parameters(), exported.parameters(), strict=True):
        assert torch.equal(mine, theirs)

    assert (tmp_path / "model" / "README.md").read_text() == "card"
    assert damage(tmp_path / "model", tmp_path / "model" / DIGESTS) is None
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert set(modes.values()) == {0o644} and (tmp_path / "model").stat().st_mode & 0o777 == 0o755, "others may read"


def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(tmp_path: Path) -> None:
    saved = tmp_path / "run" / "checkpoints" / "step-2"
    saved.mkdir(parents=True)
    (saved / "meta.json").write_text('{"step": 2, "epoch": 0, "ranks": 1}')

    with pytest.raises(CheckpointError) as raised:
        read_meta(saved)
    assert f"{saved} is of an earlier version, which called `epoch` what is `timeline` now" in str(raised.value)
    assert f"model.path={tmp_path / 'run' / 'model'}" in str(raised.value) and "\n" not in str(raised.value)
