"""Checkpoints: everything a resumed run needs, in one folder that appears by one atomic rename.

    <run>/checkpoints/step-120/
        meta.json        step, epoch, ranks (small and readable; `--resume` needs nothing else to plan)
        journal.msgpack  the broker's journal at this version: data cursor, open tasks, ledger
        state/           model, AdamW state and RNG (torch.distributed.checkpoint, one file per rank)

A folder without the suffix `.tmp` is complete. Any number of ranks can load what any other number saved.
The learning rate is a function of the step, so the schedule needs no state; AdamW's hyperparameters come
from the configuration of the resumed run.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

_MODEL_FILE_BYTES = 4 << 30
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")  # weights of the source model


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, incomplete or damaged: one line with its path."""


@dataclass(frozen=True)
class Meta:
    step: int  # batches trained
    epoch: int
    ranks: int  # that saved it


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `<run>/checkpoints`, or None."""
    complete = _complete(folder)
    return complete[-1] if complete else None


def _complete(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step-*") if path.suffix != ".tmp" and (path / "meta.json").exists()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def read_meta(checkpoint: Path) -> Meta:
    """Raises CheckpointError."""
    try:
        return Meta(**json.loads((checkpoint / "meta.json").read_text()))
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint} is not a complete checkpoint (no meta.json)") from None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint}/meta.json cannot be read: {error}") from None


def save(
    folder: Path, policy: nn.Module, adamw: torch.optim.Optimizer, meta: Meta, journal: bytes, keep: int
) -> Path:
    """Write `folder/step-N`; all ranks call it together, `journal` counts on rank 0. Keeps the newest `keep`."""
    target = folder / f"step-{meta.step}"
    partial = target.with_suffix(".tmp")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dcp.save(_state(policy, adamw), checkpoint_id=partial / "state")
    if dist.get_rank() == 0:
        _write(partial / "journal.msgpack", journal)
        _write(partial / "meta.json", json.dumps(asdict(meta)).encode())
        _sync_folder(partial)
        partial.rename(target)
        _sync_folder(folder)
        for old in _complete(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def load(checkpoint: Path, policy: nn.Module, adamw: torch.optim.Optimizer) -> Meta:
    """Load model, optimizer state and RNG in place; all ranks call it together.

    Raises CheckpointError if the checkpoint is missing, damaged or of another model.
    """
    meta = read_meta(checkpoint)
    configured = [{key: value for key, value in group.items() if key != "params"} for group in adamw.param_groups]
    state = _state(policy, adamw)
    try:
        dcp.load(state, checkpoint_id=checkpoint / "state")
    except Exception as error:  # torch reports damage with many types, some of them private
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{checkpoint} cannot be loaded: {reason}") from error
    set_state_dict(policy, adamw, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for group, values in zip(adamw.param_groups, configured, strict=True):
        group.update(values)
    torch.set_rng_state(state["rng"])
    return meta


def _state(policy: nn.Module, adamw: torch.optim.Optimizer) -> dict[str, Any]:
    model, optimizer = get_state_dict(policy, adamw)
    return {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state()}


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
