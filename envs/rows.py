"""Rows of a data set from JSONL, parquet or a hub name, with typed fields; errors name the row and the field."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rl.config.plugins import load

T = TypeVar("T")


class RowError(ValueError):
    """A source that cannot be read, or a row that is not as its schema says."""


@dataclass(frozen=True)
class Row:
    """One row and where it stands, for messages. Fields are taken with the type they must have."""

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
        return self.values.get(name) is not None

    def fail(self, name: str, why: str) -> NoReturn:
        raise RowError(f"{self.where}, field {name!r}: {why}")

    def miss(self, *names: str) -> NoReturn:
        raise RowError(f"{self.where} has no field {' or '.join(map(repr, names))}; it has {_listed(self.values)}")

    def _parsed(self, name: str, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            self.fail(name, f"{_short(text)} is not JSON ({error})")

    def _first(self, names: tuple[str, ...], default: Any) -> Any:
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
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
    """Rows of a `.jsonl` or `.parquet` file, a function `package.module:name` or a hub data set. Raises RowError.

    `columns`: those needed, so that no more of a wide parquet file is read; None: all.
    """
    path = Path(source)
    if path.suffix == ".jsonl":
        rows = _jsonl(path)
    elif path.suffix == ".parquet":
        rows = _parquet(path, columns)
    elif ":" in source and not path.exists():
        rows = _made(source)
    elif path.exists():
        raise RowError(f"{source} is neither .jsonl nor .parquet")
    else:
        rows = _hub(source, subset, split)

    for number, values in enumerate(rows, start=1):
        yield Row(values, f"{source}, row {number}")


def _made(source: str) -> Iterator[Mapping[str, Any]]:
    """Rows of a function without arguments, written `package.module:name`."""
    rows = load("source", source, {})()
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise RowError(f"{source}, row {number} is a {type(row).__name__}, not a mapping")
        yield row


def _jsonl(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RowError(_unreadable(path, error)) from None

    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RowError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise RowError(f"{path}, line {number} is not an object")
        yield row


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        there = pyarrow.parquet.read_schema(path).names
        for name in columns or ():
            if name not in there:
                raise RowError(f"{path} has no column {name!r}; it has {_listed(there)}")
        yield from pyarrow.parquet.read_table(path, columns=columns).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise RowError(_unreadable(path, error)) from None


def _unreadable(path: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            f"{path} cannot be read: no such file; source and eval_source name .jsonl or .parquet files that are there"
        )
    return f"{path} cannot be read: {error}"


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
