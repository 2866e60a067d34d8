"""Which data a run trains on, in a line for each source: a checkpoint keeps it, so that a resume knows its own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from envs.held_out_sets import HeldOutSets
from envs.mixture import MixtureFamily
from rl.config.failures import EndsRun
from rl.config.tree import ConfigError
from rollout.episodes.environment import EnvironmentFamily

_MOST_TASKS = 1_000_000  # looked at, evenly spread
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class OtherData(EndsRun, ConfigError):
    """An environment server has other tasks than its run, whose numbers then mean other ones."""

    one_line = True


def check_data(told: Mapping[str, str], name: str, family: EnvironmentFamily) -> None:
    """told: what the run began with; empty where nobody looked. Raises OtherData."""
    found = data_of(name, family) if told else {}
    for each, line in found.items():
        if line != told.get(each):
            raise OtherData(
                f"{each}: the run began with {told.get(each)}, and this server finds {line}; the source has changed "
                "since, or is another one on this machine: put back what it was, or resume with resume_data=new"
            )


def data_of(name: str, family: EnvironmentFamily) -> dict[str, str]:
    """By environment, or by member of a mixture: the number of training tasks and a digest of them."""
    if isinstance(family, HeldOutSets):
        return data_of(name, family.own)
    if isinstance(family, MixtureFamily):
        shares = family.shares
        return {label: _line(member.family, shares[label]) for label, member in family.members.items()}
    return {name: _line(family, family.task_count("train"))}


def _line(family: EnvironmentFamily, tasks: int) -> str:
    """tasks: of one pass."""
    told = getattr(family, "data", None)
    state = blake2b(digest_size=6)
    for each in _tasks(family) if told is None else told():
        state.update(_written(each).encode("utf-8", "backslashreplace") + b"\n")
    source = getattr(getattr(family, "options", None), "source", None)
    return f"{tasks} tasks{f' of {source}' if source else ''}, digest {state.hexdigest()}"


def _tasks(family: EnvironmentFamily) -> Iterable[Any]:
    count = family.task_count("train")
    for index in range(0, count, 1 + (count - 1) // _MOST_TASKS):
        yield family.task("train", index)


def _written(value: Any) -> str:
    """The same text in every process, and another one for other data; the order of a mapping's keys means nothing."""
    if isinstance(value, Mapping):
        return f"{{{','.join(sorted(f'{_written(key)}:{_written(each)}' for key, each in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{','.join(sorted(map(_written, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value))}]"

    if isinstance(value, str):
        return repr(value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return _written([*value.shape, value.tolist()])
        return f"{value.dtype}{value.shape}{blake2b(value.tobytes(), digest_size=8).hexdigest()}"
    if is_dataclass(value) and not isinstance(value, type):
        return _written([getattr(value, each.name) for each in fields(value)])

    # What shows nothing but its address: what it would keep in a pickle tells more.
    state = None
    with contextlib.suppress(TypeError):
        state = value.__getstate__() if _ADDRESS.search(repr(value)) else None
    return _ADDRESS.sub("", repr(value)) if state is None else _written(state)
