"""Checkpoint folders: everything a resumed run needs, appearing by one atomic rename (no torch here).

    <run>/checkpoints/step-120/
        meta.json        step, timeline, ranks (small and readable; planning a resumed run needs nothing else)
        journal.msgpack  the broker's journal at this version: data cursor, open tasks, ledger
        state/           model, optimizer and RNG (`rl.learner.checkpoint`; absent from simulated learners)
        digests.json     of every other file

A folder without the suffix `.tmp` is complete, and whole if its files are as their digests say.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl.config.failures import EndsRun
from rl.store.digests import DIGESTS, damage, write_digests, write_synced


class CheckpointError(EndsRun, RuntimeError):
    """A checkpoint that is missing, incomplete or damaged: one line with its path."""

    one_line = True


@dataclass(frozen=True)
class Meta:
    step: int  # batches trained
    timeline: int
    ranks: int  # that saved it
    lora: dict[str, Any] | None = None
    """Of adapters alone: `LoraOptions.identity`, and as `base` the digest of the weights that they stand on."""

    @property
    def lora_options(self) -> dict[str, Any] | None:
        """What `model.lora` says of its adapters."""
        return {name: value for name, value in self.lora.items() if name != "base"} if self.lora else None


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `<run>/checkpoints`, or None."""
    return next(reversed(steps_of(folder).values()), None)


def steps_of(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in `<run>/checkpoints` by their step, the oldest first.

    A copy that somebody has put beside them, as `step-120-best`, is none of ours.
    """
    named = {path.name.removeprefix("step-"): path for path in folder.glob("step-*")}
    complete = {step: path for step, path in named.items() if step.isdecimal() and (path / "meta.json").exists()}
    return {int(step): complete[step] for step in sorted(complete, key=int)}


def drop_behind(folder: Path, step: int) -> None:
    """Forget the checkpoints of later steps, which were taken back."""
    for later, path in steps_of(folder).items():
        if later > step:
            shutil.rmtree(path)


def verify(checkpoint: Path) -> Meta:
    """Every file is as it was written. Raises CheckpointError, which names another checkpoint that is whole."""
    changed = damage(checkpoint, checkpoint / DIGESTS)
    begun = any((checkpoint / name).exists() for name in ("meta.json", DIGESTS))
    if changed is None or not begun:
        return read_meta(checkpoint)

    others = [path for path in reversed(steps_of(checkpoint.parent).values()) if path != checkpoint]
    whole = next((path for path in others if damage(path, path / DIGESTS) is None), None)
    remedy = f"resume={whole} is whole" if whole else "no other checkpoint beside it is whole: begin anew"
    raise CheckpointError(f"{changed} was damaged or removed since it was written; {remedy}")


def read_meta(checkpoint: Path) -> Meta:
    """Raises CheckpointError."""
    try:
        saved = json.loads((checkpoint / "meta.json").read_text())
        if "epoch" in saved:
            text = f"{checkpoint} is of an earlier version, which called `epoch` what is `timeline` now"
            raise CheckpointError(f"{text}: begin anew with model.path={checkpoint.parents[1] / 'model'}")
        return Meta(**saved)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{checkpoint} is not a complete checkpoint (no meta.json)") from None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint}/meta.json cannot be read: {error}") from None


def read_journal(checkpoint: Path) -> bytes:
    """What the broker gave to `commit`. Raises CheckpointError."""
    try:
        return (checkpoint / "journal.msgpack").read_bytes()
    except OSError as error:
        raise CheckpointError(f"{checkpoint} has no broker journal: {error.strerror}") from None


def begin(folder: Path, step: int) -> Path:
    """An empty folder `step-N.tmp` to write into; what an earlier attempt left there is gone."""
    partial = partial_path(folder, step)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def partial_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.tmp"


def commit(folder: Path, meta: Meta, journal: bytes, keep: int) -> Path:
    """Complete what `begin` began and everyone has written; then only the newest `keep` checkpoints stay."""
    partial = partial_path(folder, meta.step)
    write_synced(partial / "journal.msgpack", journal)
    write_synced(partial / "meta.json", json.dumps(asdict(meta)).encode())
    write_digests(partial, partial / DIGESTS)
    sync_folder(partial)
    target = partial.with_suffix("")
    partial.rename(target)
    sync_folder(folder)
    for old in [*steps_of(folder).values()][:-keep]:
        shutil.rmtree(old)
    return target


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
