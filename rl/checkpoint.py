"""What torch adds to a checkpoint: model, AdamW state and RNG, and the export to a folder that others load.

Saved by all ranks (torch.distributed.checkpoint, one file per rank); any number of ranks can load what any
other number saved. The learning rate is a function of the step, so the schedule needs no state; AdamW's
hyperparameters come from the configuration of the resumed run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from rl.checkpoint_folder import CheckpointError, Meta, begin, commit, partial_path, read_meta

_MODEL_FILE_BYTES = 4 << 30
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".index.json")  # weights of the source model


def save(folder: Path, policy: nn.Module, adamw: torch.optim.Optimizer, meta: Meta, journal: bytes, keep: int) -> None:
    """Write `folder/step-N`; all ranks call it together, `journal` counts on rank 0. Keeps the newest `keep`."""
    if dist.get_rank() == 0:
        begin(folder, meta.step)
    dist.barrier()
    dcp.save(_state(policy, adamw), checkpoint_id=partial_path(folder, meta.step) / "state")
    if dist.get_rank() == 0:
        commit(folder, meta, journal, keep)
    dist.barrier()


def load(checkpoint: Path, policy: nn.Module, adamw: torch.optim.Optimizer) -> Meta:
    """Load model, optimizer state and RNG in place; all ranks call it together.

    Raises CheckpointError if the checkpoint is missing, damaged or of another model.
    """
    meta = read_meta(checkpoint)
    configured = [{key: value for key, value in group.items() if key != "params"} for group in adamw.param_groups]
    state = _state(policy, adamw)
    try:
        dcp.load(state, checkpoint_id=checkpoint / "state")
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception; damage has many types
        raise CheckpointError(f"{checkpoint} cannot be loaded: {_reason(error)}") from error
    set_state_dict(policy, adamw, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for group, values in zip(adamw.param_groups, configured, strict=True):
        group.update(values)
    torch.set_rng_state(state["rng"])
    return meta


def _reason(error: BaseException) -> str:
    """One line: the failure of the first rank that had one."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _state(policy: nn.Module, adamw: torch.optim.Optimizer) -> dict[str, Any]:
    model, optimizer = get_state_dict(policy, adamw)
    return {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state()}
