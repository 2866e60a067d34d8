"""What a run writes that is as large as its model: checkpoints, and the model that it has trained.

A run of a day must not lose them because the disk was full when it began.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.machine import size_text
from launch.plan import learner_computes
from rl.config.lora import lora_options
from rl.config.schema import Config, ConfigError
from rl.models.shape import ModelShape

_MASTER = 4  # bytes of a parameter in float32, as of adapters that are written beside the trained model
_SAVED = 3 * _MASTER  # in a checkpoint: itself and AdamW's two moments


@dataclass(frozen=True)
class Written:
    """Bytes on the disk of the runs' folder. Nothing where no model is trained, or its shape is not known yet."""

    checkpoint: int = 0
    checkpoints: int = 0
    """The most that there are at once: with those that are kept, the one that is being written."""
    model: int = 0

    @property
    def at_end(self) -> int:
        """Bytes that the end of a run writes."""
        return self.checkpoint + self.model

    @property
    def together(self) -> int:
        return self.checkpoints * self.checkpoint + self.model

    def __str__(self) -> str:
        checkpoints = "1 checkpoint" if self.checkpoints == 1 else f"{self.checkpoints} checkpoints at once"
        return f"{checkpoints} of {size_text(self.checkpoint)}, and {size_text(self.model)} of the trained model"


def written_by(config: Config, model: ModelShape | None, told: Mapping[str, Any], start_step: int = 0) -> Written:
    """By a run of this configuration from `start_step` on; a `resume` keeps what it goes on from besides, elsewhere.

    told: the model's `config.json`, whose dtype the trained one has as well.
    """
    if model is None or not learner_computes(config):
        return Written()

    learner = config.learner
    lora = lora_options(config.model)
    policy = model.adapters(lora.rank, lora.named) if lora else model.trained
    critic = model.valuing if config.algo.critic is not None else 0
    tied = model.matrix if model.tied and not lora else 0  # stands in a checkpoint under both of its names

    number = 4 if (told.get("dtype") or told.get("torch_dtype") or "float32") == "float32" else 2
    every = learner.checkpoint_every
    made = math.ceil(config.steps / every) - start_step // every if every else 1
    return Written(
        checkpoint=_SAVED * (policy + critic) + _MASTER * tied,
        checkpoints=min(made, learner.keep_checkpoints + 1),
        model=number * model.trained + (_MASTER * policy if lora else 0),
    )


def check_disk(written: Written, config: Config) -> None:
    """Raises ConfigError where the disk of the runs' folder has no room for all of it."""
    here = config.runs.absolute()
    existing = next(folder for folder in (here, *here.parents) if folder.exists())
    usage = shutil.disk_usage(existing)
    if written.together <= usage.free or not usage.total:  # some file systems of users' own programs do not say
        return

    fewer = "lower learner.keep_checkpoints, or " if written.checkpoints > 1 else ""
    raise ConfigError(
        f"runs={str(config.runs)!r}: its disk has {size_text(usage.free)} free, and the run writes {written}: "
        f"{size_text(written.together)}; {fewer}make room, or choose another folder"
    )
