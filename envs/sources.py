"""Where the tasks of a family come from, and which of them are held out for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")


class SourceOptions(BaseModel):
    """Options of every family whose tasks are generated or rows of a data set."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    source: str = "generated"
    """`generated`, files (JSON Lines, JSON, CSV, parquet; a folder, a glob) or a hub name, with rows of a form that the
    family knows."""
    subset: str | None = None
    """Subset of a hub data set."""
    split: str = "train"
    """Split of a hub data set to train on."""
    eval_source: str | None = None
    """Held-out tasks: another file or hub name; None: the last `eval_count` tasks of the source."""
    eval_split: str = "test"
    """Split of `eval_source` where that is a hub name."""
    eval_count: int = Field(ge=0)
    """Tasks held out of the source."""


def split_tasks(
    options: SourceOptions, tasks: list[T], load: Callable[[str, str | None, str], list[T]]
) -> dict[str, list[T]]:
    """`tasks` of the source as those of `train` and `eval`; `load(source, subset, split)` reads an `eval_source`.

    Raises ValueError where no task is left for training.
    """
    if not tasks:
        raise ValueError(f"{options.source} has no rows")
    if options.eval_source is not None:
        held_out = load(options.eval_source, options.subset, options.eval_split)
        if not held_out:
            raise ValueError(f"eval_source={options.eval_source!r} has no rows")
        return {"train": tasks, "eval": held_out}
    if options.eval_count >= len(tasks):
        raise ValueError(f"eval_count={options.eval_count}: {options.source} has only {len(tasks)} tasks")
    cut = len(tasks) - options.eval_count
    return {"train": tasks[:cut], "eval": tasks[cut:]}
