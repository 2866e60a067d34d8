"""Rows of a data set from files, a function or a hub name, with typed fields; errors name the row and the field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NoReturn, TypeVar

from envs.row_files import RowError as RowError
from envs.row_files import files_of, mended, parsed, read_file
from rl.config.plugins import is_file, load
from rl.wire.text import Mender

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """One row and where it stands, for messages. Fields are taken with the type they must have.

    A field's name may be a path, as in `reward_model.ground_truth`; a field that is called so itself comes first.
    """

    values: Mapping[str, Any]
    where: str

    def text(self, *names: str, default: str | None = None) -> str:
        """The first of the named fields that is there; must be a string. Raises RowError."""
        return self._typed(names, str, "a text", default)

    def integer(self, name: str) -> int:
        return self._typed((name,), int, "an integer", None)

    def strings(self, *names: str, default: list[str] | None = None) -> list[str]:
        """A list of strings, or a string that is one in JSON. Raises RowError."""
        value = self._first(names, default)
        if isinstance(value, str):
            value = self._parsed(names[0], value)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.fail(names[0], f"{_short(value)} is not a list of texts")
        return value

    def json(self, name: str) -> Any:
        """A value of any type, or a string that is one in JSON. Raises RowError."""
        value = self._first((name,), None)
        return self._parsed(name, value) if isinstance(value, str) else value

    def has(self, name: str) -> bool:
        return self.get(name) is not None

    def get(self, name: str) -> Any:
        """The value as it is; None where there is none."""
        if name in self.values:
            return self.values[name]

        value: Any = self.values
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return None
            value = value[part]
        return value

    def gold(self, name: str) -> Any:
        """The value of the field that holds the right answer. Raises RowError if it is missing, null, empty, NaN or
        infinite."""
        value = self.get(name)
        if value is None and name not in self.values:
            self.miss(name)
        blank = (
            not value.strip() if isinstance(value, str) else value is None or (isinstance(value, list) and not value)
        )
        if blank or (isinstance(value, Real) and not math.isfinite(value)):
            self.fail(name, f"{_short(value)} is no answer; give the row one, or leave the row out")
        return value

    def fail(self, name: str, why: str) -> NoReturn:
        raise RowError(f"{self.where}, field {name!r}: {why}")

    def miss(self, *names: str) -> NoReturn:
        there = [name for name, value in self.values.items() if value is not None]
        raise RowError(f"{self.where} has no field {' or '.join(map(repr, names))}; it has {_listed(there)}")

    def _parsed(self, name: str, text: str) -> Any:
        try:
            return Mender().value(parsed(f"{self.where}, field {name!r}: {_short(text)}", text))
        except RecursionError:
            self.fail(name, "is nested too deep")

    def _first(self, names: tuple[str, ...], default: Any) -> Any:
        for name in names:
            if (value := self.get(name)) is not None:
                return value
        if default is None:
            self.miss(*names)
        return default

    def _typed(self, names: tuple[str, ...], kind: type[T], what: str, default: T | None) -> T:
        value = self._first(names, default)
        if not isinstance(value, kind):
            self.fail(names[0], f"{_short(value)} is not {what}")
        return value


def read_rows(
    source: str, subset: str | None = None, split: str = "train", columns: Sequence[str] | None = None
) -> Iterator[Row]:
    """Rows of files, of a function (`package.module:name`, `FILE.py:name`) or of a hub data set. Raises RowError.

    Files are one, those of a folder, or those of a glob; `envs.row_files` says of which kinds.

    `columns`: those needed, so that no more of a wide parquet file is read; None: all.
    """
    files = [] if _is_function(source) else files_of(source)
    for file in files:
        for number, values in enumerate(read_file(file, columns), start=1):
            yield Row(values, f"{file}, row {number}")
    if files:
        return

    rows = _made(source) if _is_function(source) else _hub(source, subset, split)
    for number, values in enumerate(mended(source, rows), start=1):
        yield Row(values, f"{source}, row {number}")


def is_at_hand(source: str) -> bool:
    """Whether it is no data set of the hub, which has splits. Raises RowError as `read_rows` does."""
    return _is_function(source) or bool(files_of(source))


def _is_function(source: str) -> bool:
    module, separator, name = source.partition(":")
    words = all(part.isidentifier() for part in module.split("."))
    return bool(separator) and name.isidentifier() and (words or is_file(module))


def _made(source: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a function without arguments."""
    rows = load("source", source, {})()
    if not isinstance(rows, Iterable):
        raise RowError(f"{source} gave a {type(rows).__name__}, not rows")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise RowError(f"{source}, row {number} is a {type(row).__name__}, not a mapping")
        yield row


def _hub(name: str, subset: str | None, split: str) -> Iterator[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise RowError(f"{name!r} is no file, and hub data sets need `pip install datasets`") from None
    try:
        yield from datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # of the hub's client: network, names, subsets, scripts
        what = f"{name}:{subset}" if subset else name
        why = f"{type(error).__name__}: {error}"
        raise RowError(f"{what!r} ({split}) is no file and did not load from the hub: {why}") from error


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
