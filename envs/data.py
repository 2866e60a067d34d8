"""Which data a run trains on, in a line for each source: a checkpoint keeps it, so that a resume knows its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

from envs.mixture import MixtureFamily
from rollout.episodes.environment import EnvironmentFamily

_MOST_TASKS = 1_000_000  # looked at, evenly spread
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def data_of(name: str, family: EnvironmentFamily) -> dict[str, str]:
    """By environment, or by member of a mixture: the number of training tasks and a digest of them."""
    if isinstance(family, MixtureFamily):
        shares = family.shares
        return {label: _line(member.family, shares[label]) for label, member in family.members.items()}
    return {name: _line(family, family.task_count("train"))}


def _line(family: EnvironmentFamily, tasks: int) -> str:
    """tasks: of one pass."""
    told = getattr(family, "data", None)
    state = blake2b(digest_size=6)
    for each in _tasks(family) if told is None else told():
        state.update(_ADDRESS.sub("", repr(each)).encode("utf-8", "backslashreplace") + b"\n")
    source = getattr(getattr(family, "options", None), "source", None)
    return f"{tasks} tasks{f' of {source}' if source else ''}, digest {state.hexdigest()}"


def _tasks(family: EnvironmentFamily) -> Iterable[Any]:
    count = family.task_count("train")
    for index in range(0, count, 1 + (count - 1) // _MOST_TASKS):
        task = family.task("train", index)
        plain = is_dataclass(task) and not isinstance(task, type)
        yield [getattr(task, each.name) for each in fields(task)] if plain else task
