"""`fresco export CHECKPOINT OUT --merge | --adapter`: a checkpoint as a folder that others load.

`--merge` writes a model, `--adapter` the adapters of a run with `model.lora` in peft's format. Both are read again from
the model that the run began with, so that nothing of it is rounded.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch.distributed as dist

from launch.commands.evaluate import find_target
from launch.terminal import say
from rl.config.lora import lora_options
from rl.config.schema import ConfigError
from rl.learner.checkpoint import export_hf
from rl.learner.model_card import texts_beside
from rl.learner.trainer import export_adapter, saved_policy
from rl.models.loading import weight_files
from rl.store.checkpoint_folder import CheckpointError, Meta, latest, read_meta
from rl.store.digests import digest_of
from rl.wire.run import RunFile


def export(arguments: argparse.Namespace) -> int:
    """Returns 0. Raises ConfigError for what is no whole checkpoint, and for a base that is another one."""
    folder, out = Path(arguments.target), arguments.out.absolute()
    partial = out.with_name(f"{out.name}.tmp")
    if not folder.exists():
        raise ConfigError(f"there is no {arguments.target!r}; name a checkpoint, or a run's folder")
    if (folder / "model").is_dir() and latest(folder / "checkpoints") is None:
        raise ConfigError(f"{arguments.target!r} has no checkpoint; how it ended is in its folders model and adapter")
    target = find_target(arguments.target)
    for taken in (out, partial):
        if taken.exists():
            raise ConfigError(f"{str(taken)!r} exists; name a new folder")
    if not target.is_checkpoint or target.run is None:
        raise ConfigError(f"{arguments.target!r} is no checkpoint in its own run, which says what it began with")

    saved, meta = Path(target.path), read_meta(Path(target.path))
    run = RunFile.load(target.run)
    options = lora_options(run.config.model)
    if arguments.adapter and options is None:
        raise ConfigError(f"--adapter: {arguments.target!r} was trained without model.lora; --merge writes its model")
    start = _start(run, meta)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        policy = saved_policy(run.config, start, saved)

        if options is not None and arguments.adapter:
            export_adapter(policy, options, run.config, start, out)
        else:
            export_hf(policy, out, start, texts_beside(run, meta.step))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"{str(arguments.out)!r} cannot be written: {error}") from None
    finally:
        dist.destroy_process_group()
        shutil.rmtree(partial, ignore_errors=True)  # of an export that did not come to its end

    say(f"step {meta.step} of {run.config.name} is now {out}")
    return 0


def _start(run: RunFile, meta: Meta) -> Path:
    """The model that the run began with. Raises ConfigError where it is gone, or another one by now."""
    folder = run.model_folder
    if folder is None:
        raise ConfigError(f"{str(run.folder)!r} has no model: learner.kind={run.config.learner.kind} trains none")
    if not folder.exists():
        raise ConfigError(f"{str(folder)!r}, which the run began with, is not there any more; make it again there")
    if meta.lora is not None and digest_of({*weight_files(folder).values()}) != meta.lora["base"]:
        raise ConfigError(f"{str(folder)!r} has other weights than those that the adapters of this run belong to")
    return folder
