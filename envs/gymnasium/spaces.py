"""Spaces as words: what a model is told of an action space, an action out of what it wrote, a value as text."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

MOST_NUMBERS = 256  # of an observation or an action: beyond that it is a picture, and no text
MOST_CHARS = 20_000  # of an action
DIGITS = 4  # significant ones of a number that is shown


def size(space: Any) -> int:
    """Numbers (or texts) of one value. Raises ValueError for a space without a form as text."""
    match type(space).__name__:
        case "Discrete" | "Text":
            return 1
        case "Box" | "MultiDiscrete" | "MultiBinary":
            return math.prod(space.shape)
        case "Tuple":
            return sum(map(size, space.spaces))
        case "Dict":
            return sum(map(size, space.spaces.values()))
        case other:
            raise ValueError(f"a space of kind {other} has no form as text")


def describe(space: Any, names: tuple[str, ...] = ()) -> str:
    """What an action is, for the prompt. `names`: of a Discrete space's actions."""
    match type(space).__name__:
        case "Discrete" if names:
            return "one of: " + ", ".join(names)
        case "Discrete":
            return f"an integer from {space.start} to {space.start + space.n - 1}"
        case "Text":
            return f"a text of {space.min_length} to {space.max_length} characters"
        case "Box":
            low = _bound(space.low)
            high = _bound(space.high)
            kind = "integers" if np.issubdtype(space.dtype, np.integer) else "numbers"
            return f"a JSON list of {kind} with shape {list(space.shape)}, each from {low} to {high}"

        case "MultiDiscrete":
            return f"a JSON list of integers, each from 0 to less than {space.nvec.tolist()}"
        case "MultiBinary":
            return f"a JSON list of 0 and 1 with shape {list(space.shape)}"
        case "Tuple":
            return "a JSON list of: " + "; ".join(map(describe, space.spaces))
        case _:
            return "a JSON object with " + "; ".join(f"{key!r}: {describe(of)}" for key, of in space.spaces.items())


def parse(space: Any, text: str, names: tuple[str, ...] = ()) -> Any:
    """The action that a text says. Raises ValueError, with a reason that a model may read."""
    if len(text) > MOST_CHARS:
        raise ValueError(f"an action has at most {MOST_CHARS} characters")

    kind = type(space).__name__
    word = text.strip().strip("\"'`")
    lowered = [name.lower() for name in names]
    if kind == "Discrete" and word.lower() in lowered:
        return space.start + lowered.index(word.lower())
    if kind == "Text":
        return _contained(space, text)

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{text.strip()[:40]!r} is not {describe(space, names)}") from None
    try:
        return _contained(space, _cast(space, value))
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise ValueError(f"{text.strip()[:40]!r} is not {describe(space, names)}") from None


def show(value: Any) -> str:
    """An observation as JSON, its numbers with four significant digits."""
    return json.dumps(_plain(value), ensure_ascii=False)


def _cast(space: Any, value: Any) -> Any:
    """JSON as a value of the space, of the types that the space asks for. Raises ValueError or TypeError."""
    match type(space).__name__:
        case "Discrete":
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError("no integer")
            return value
        case "Text":
            return value

        case "Tuple":
            return tuple(_cast(of, part) for of, part in zip(space.spaces, value, strict=True))
        case "Dict":
            if value.keys() != space.spaces.keys():
                raise ValueError("other keys")
            return {key: _cast(of, value[key]) for key, of in space.spaces.items()}

    numbers = np.asarray(value, dtype=np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError("no finite numbers")
    whole = not np.issubdtype(space.dtype, np.floating)
    if whole and not (numbers == np.round(numbers)).all():
        raise ValueError("no integers")
    if numbers.size == 1 and math.prod(space.shape) == 1:
        numbers = numbers.reshape(space.shape)  # a bare number for a list of one
    return numbers.astype(space.dtype)


def _contained(space: Any, value: Any) -> Any:
    if not space.contains(value):
        raise ValueError("not in the space")
    return value


def _bound(bounds: np.ndarray) -> Any:
    values = np.unique(bounds)
    return _plain(values[0]) if len(values) == 1 else _plain(bounds)


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _plain(part) for key, part in value.items()}
        case tuple() | list():
            return [_plain(part) for part in value]

        case np.ndarray() | np.generic():
            return _plain(value.tolist())
        case float():
            return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
        case bool() | int() | str() | None:
            return value
        case _:
            return str(value)
