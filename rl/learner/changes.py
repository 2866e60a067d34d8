"""Changes of a run that goes on, made at the end of a step: `fresco set` and `fresco undo` ask for them.

What is asked stands in `<run>/wish.json` until rank 0 takes it. Before it is done it stands in `<run>/changes.jsonl`,
so that a learner which dies meanwhile does it again, and so does a replay:
{"step", "timeline", "sets", "undo"}. Sets hold from batch `step` on. An undo to version n begins `timeline`, and what
was set later than n is void.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rl.config.damage import read_lines
from rl.config.schema import LearnerConfig
from rl.store.checkpoint_folder import drop_behind, steps_of

CHANGES = "changes.jsonl"
WISH = "wish.json"
SETTABLE = tuple(f"learner.{name}" for name in ("lr", "warmup_steps", "schedule", "min_lr_fraction", "max_grad_norm"))
"""Fields that every step reads anew."""
_REACH = 2  # checkpoints: further back the broker does not remember


class Change(msgspec.Struct):
    step: int = -1
    timeline: int = 0
    sets: dict[str, Any] = {}
    undo: int | None = None


def read_changes(run_folder: Path) -> list[Change]:
    return list(read_lines(run_folder / CHANGES, Change))


def set_at(changes: list[Change], step: int) -> Mapping[str, Any]:
    """What is set when batch `step` is trained."""
    held: list[Change] = []
    for change in changes:
        if change.undo is not None:
            held = [each for each in held if each.step <= change.undo]
        held.append(change)
    return {name: value for each in held if each.step <= step for name, value in each.sets.items()}


def settle(config: LearnerConfig, began: LearnerConfig, sets: Mapping[str, Any]) -> None:
    """Every step reads these fields of `config` anew; what is not set is as the run `began`."""
    for field in SETTABLE:
        name = field.partition(".")[2]
        value = sets.get(field, getattr(began, name))
        if getattr(config, name) != value:
            setattr(config, name, value)


def reachable(run_folder: Path) -> dict[int, Path]:
    """The checkpoints to which a run can go back, by step."""
    return dict([*steps_of(run_folder / "checkpoints").items()][-_REACH:])


def unfinished(run_folder: Path, timeline: int) -> int | None:
    """The version of an undo that was begun when the learner died in this timeline."""
    undone = [change for change in read_changes(run_folder) if change.undo is not None]
    return undone[-1].undo if undone and undone[-1].timeline > timeline else None


def take_wish(run_folder: Path, step: int, timeline: int, *, may_undo: bool = True) -> Change | None:
    """What is asked for, once, now that version `step` is there; it stands in the file on return. For rank 0.

    may_undo: whether all ranks find its checkpoints.
    """
    path = run_folder / WISH
    try:
        wish = msgspec.json.decode(path.read_bytes(), type=Change)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError:
        path.unlink(missing_ok=True)  # nobody could ask for anything any more
        return None

    change = None
    undo = wish.undo
    if undo is None or (may_undo and undo < step and undo in reachable(run_folder)):
        change = Change(step if undo is None else undo, timeline + (undo is not None), wish.sets, undo)
        with (run_folder / CHANGES).open("ab") as file:
            file.write(msgspec.json.encode(change) + b"\n")
        if undo is not None:
            drop_behind(run_folder / "checkpoints", undo)
    path.unlink(missing_ok=True)  # also where a checkpoint has come meanwhile, and that one is out of reach
    return change
