"""Messages of every type that there is, found by looking, with whatever fits the types of their fields."""

from __future__ import annotations

import random
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from msgspec import Struct

from rl.wire.columns import COLUMNS
from rl.wire.messages import Message

KINDS: tuple[type[Message], ...] = get_args(Message)
_NUMBERS = [0, 1, 2, 3, 7, 40, -1, 2**31, 45_000_000_000, 2**62]
_FLOATS = [0.0, 0.5, 1.0, -1.0, 1e30, float("inf"), float("nan")]
_TEXTS = ["", "train", "eval", "learner", "broker", "stop", "done", "train/loss", "data-repeated", "\u001b[2J"]


def any_message(kind: type[Message], pick: random.Random) -> Message:
    made = _any(kind, pick)
    assert isinstance(made, kind)
    return made


def _any(kind: Any, pick: random.Random) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Struct):
        return kind(**{name: _any(each, pick) for name, each in get_type_hints(kind).items() if name in _fields(kind)})
    if origin in (Union, types.UnionType):
        return _any(pick.choice(arguments), pick)
    if origin is list:
        return [_any(arguments[0], pick) for _ in range(pick.randrange(3))]
    if origin is tuple:
        return tuple(_any(each, pick) for each in arguments)
    if origin is dict:
        keys = list(COLUMNS) if arguments[1] is np.ndarray else [_any(arguments[0], pick) for _ in range(2)]
        return {key: _any(arguments[1], pick) for key in pick.sample(keys, pick.randrange(len(keys) + 1))}

    if kind is np.ndarray:
        return np.zeros(pick.randrange(4), pick.choice(["i4", "f4", "u1"]))
    if kind is bytes:
        return pick.choice([b"", b"{}", b"no json"])
    of_kind: dict[Any, list[Any]] = {
        int: _NUMBERS,
        float: _FLOATS,
        str: _TEXTS,
        bool: [True, False],
        types.NoneType: [None],
    }
    return pick.choice(of_kind[kind])


def _fields(kind: type[Struct]) -> tuple[str, ...]:
    return kind.__struct_fields__
