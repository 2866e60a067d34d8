"""Sittings of one run: what `resume` means, and the history that a run which goes on has from the sittings before.

A run that goes on has a folder of its own; that of the sitting before is kept beside it, numbered. `resume=auto`, or
the same command again, finds its newest checkpoint, wherever it stands by now.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.provenance import differences
from launch.terminal import say
from rl.config.damage import read_lines
from rl.config.schema import Config, ConfigError, load_config
from rl.config.tree import differing
from rl.learner.changes import read_changes, set_at
from rl.store.checkpoint_folder import latest, read_meta

AUTO, NEW = "auto", "new"
_OF_A_SITTING = {"resume", "resume_data"}


def with_checkpoint(config: Config) -> Config:
    """The configuration with the checkpoint that its `resume` means, or none. Raises ConfigError.

    Without `resume` a run of this name goes on that was of the same configuration and stopped before its end. What
    `fresco set` had set in a sitting ends with it, and is told.
    """
    found = _with_checkpoint(config)
    if found.resume is not None and (found.resume / "meta.json").exists():
        held = set_at(read_changes(found.resume.absolute().parents[1]), read_meta(found.resume).step)
        own = {field: getattr(found.learner, field.partition(".")[2], value) for field, value in held.items()}
        lost = " ".join(f"{field}={value}" for field, (value, _) in differing(held, own).items())
        if lost:
            say(f"! what fresco set had set ended with that run; to keep it, give {lost}")
    return found


def _with_checkpoint(config: Config) -> Config:
    folder = config.runs / config.name
    asked = str(config.resume) if config.resume is not None else ""
    if asked == NEW or (not asked and config.steps == 0):
        return config.model_copy(update={"resume": None})
    if asked not in ("", AUTO):
        return _of_folder(config)

    newest = newest_checkpoint(folder)
    if newest is None or (not asked and _has_ended(folder, newest, config)):
        return config.model_copy(update={"resume": None})
    step = read_meta(newest).step
    if not asked and (changed := _changes(folder, config)):
        say(f"a run of this name stopped at step {step}, with other {changed}; resume=auto goes on from there")
        return config
    if not asked:
        say(f"going on from step {step}, where the run of this name stopped; resume=new begins anew")
    return config.model_copy(update={"resume": newest})


def history_of(checkpoint: Path, step: int, evaluates: bool) -> Iterator[dict[str, Any]]:
    """Rows of metrics of the sittings before, up to the checkpoint; what was trained behind it is trained again.

    evaluates: the checkpoint's version is evaluated anew.
    """
    for row in read_rows(checkpoint.absolute().parents[1]):
        if row["step"] < step or (row["step"] == step and ("train/loss" in row or not evaluates)):
            yield row


def read_rows(run: Path) -> Iterator[dict[str, Any]]:
    """Rows of `metrics.jsonl`, as far as they can be read."""
    return read_lines(run / "metrics.jsonl", dict[str, Any])


def _of_folder(config: Config) -> Config:
    """A run's folder stands for its newest checkpoint."""
    assert config.resume is not None
    if not (config.resume / "checkpoints").is_dir():
        return config
    newest = newest_checkpoint(config.resume)
    if newest is None:
        raise ConfigError(f"resume={str(config.resume)!r}: a run without a complete checkpoint; leave it out")
    return config.model_copy(update={"resume": newest})


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run: its own, else that with which it began."""
    if (own := latest(folder / "checkpoints")) is not None:
        return own
    began = _config_of(folder)
    return began.resume if began is not None and began.resume is not None and began.resume.exists() else None


def _has_ended(folder: Path, newest: Path, config: Config) -> bool:
    last = max((row for row in read_rows(folder) if "train/loss" in row), key=lambda row: row["step"], default={})
    return read_meta(newest).step >= config.steps or (last.get("time/over") or 0.0) >= 1


def _changes(folder: Path, config: Config) -> str:
    """The fields that have other values than the run had, in words."""
    began = _config_of(folder)
    if began is None:
        return "fields, of another version"
    return ", ".join(field for field in differences(began, config) if field not in _OF_A_SITTING)


def _config_of(folder: Path) -> Config | None:
    try:
        return load_config(folder / "config.yaml")
    except ConfigError:  # none, or of an earlier version
        return None


def write_history(folder: Path, config: Config, step: int) -> None:
    """The rows of the sittings before, in the folder of the one that begins. An evaluation alone has none."""
    if config.resume is None or not config.steps:
        return
    rows = history_of(config.resume, step, evaluates=config.eval.tasks > 0)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
