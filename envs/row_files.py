"""Files of rows as they are found: JSON Lines, JSON, CSV (each also with .gz) and parquet, one by one or many together.

A line of JSON Lines ends with a line feed and with nothing else: texts may hold every other separator of lines that
Unicode knows. All text is UTF-8, whatever the locale says, with or without a mark at its beginning.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.wire.text import Mender

KINDS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet")
Values = Mapping[str, Any]
_MARK = "\ufeff"


class RowError(ValueError):
    """A source that cannot be read, or a row that is not as its schema says."""


def files_of(source: str) -> list[Path]:
    """The files that a path, a folder or a glob names, by name; none if it names nothing on this disk.

    Raises RowError for a folder or a glob without files of rows, for a file of another kind, and for what is no file.
    To open a pipe would wait for who writes to it, and a device may have no end.
    """
    path = Path(source)
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if _kind(each) and not each.name.startswith("."))
    elif path.exists():
        found = [path]
    elif glob.has_magic(source):
        found = sorted(Path(each) for each in glob.glob(source, recursive=True))
    elif _kind(path):
        found = [path]
    else:
        return []

    if not found:
        raise RowError(f"{source} names no file of rows; these can be read: {', '.join(KINDS)}")
    for each in found:
        if not _kind(each):
            raise RowError(f"{each} is no file of rows; these can be read: {', '.join(KINDS)}")
        if each.exists() and not each.is_file():
            fix = "write the rows into a file, and name that in source or eval_source"
            raise RowError(f"{each} is {_what(each)}, which is not read; {fix}")
    return found


def read_file(path: Path, columns: Sequence[str] | None) -> Iterator[Values]:
    """The rows of one file; `columns` narrows what is read of a parquet file. Raises RowError."""
    kind = _kind(path)
    if kind == ".parquet":
        return _parquet(path, columns)
    reader = {".jsonl": _jsonl, ".json": _json, ".csv": _csv}[kind.removesuffix(".gz")]
    return mended(str(path), reader(path))


def _kind(path: Path) -> str:
    return next((kind for kind in KINDS if path.name.endswith(kind)), "")


def _what(path: Path) -> str:
    """What stands there instead of a file."""
    if path.is_dir():
        return "a folder"
    if path.is_socket():
        return "a socket"
    return "a named pipe" if path.is_fifo() else "a device"


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except FileNotFoundError:
        fix = "source and eval_source name files that are there"
        raise RowError(f"{path} cannot be read: no such file; {fix}") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise RowError(f"{path} cannot be read: {error}") from None


def _jsonl(path: Path) -> Iterator[Values]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            yield _object(f"{path}, line {number}", line.removeprefix(_MARK))  # files were put one behind another


def _json(path: Path) -> Iterator[Values]:
    rows = parsed(str(path), _text(path))
    if not isinstance(rows, list):
        raise RowError(f"{path} is no list of objects; rows one a line belong into a .jsonl file")
    for number, row in enumerate(rows, start=1):
        yield _mapping(f"{path}, row {number}", row)


def _csv(path: Path) -> Iterator[Values]:
    csv.field_size_limit(sys.maxsize)  # a prompt may be long
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        names = list(reader.fieldnames or [])
        if not names:
            raise RowError(f"{path} is empty; its first line names the fields")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RowError(f"{path}: the field {twice[0]!r} stands twice in its first line; keep one of them")

        for row in reader:
            if None in row:
                raise RowError(f"{path}: a row has more fields than the {len(names)} of the first line")
            yield row
    except csv.Error as error:
        raise RowError(f"{path}, line {reader.line_num + 1} is not CSV: {error}") from None


def _object(where: str, text: str) -> Values:
    return _mapping(where, parsed(where, text))


def parsed(where: str, text: str) -> Any:
    """What a JSON text says. Raises RowError, also for a field that stands in an object twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise RowError(f"{where}: the field {twice!r} stands in it twice; keep one of them")
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except RowError:
        raise
    except RecursionError:
        raise RowError(f"{where} is nested too deep") from None
    except ValueError as error:
        raise RowError(f"{where} is not JSON: {error}") from None


def _mapping(where: str, row: Any) -> Values:
    if not isinstance(row, dict):
        raise RowError(f"{where} is not an object")
    return row


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[Values]:
    import pyarrow
    import pyarrow.parquet

    if not path.exists():
        raise RowError(f"{path} cannot be read: no such file; source and eval_source name files that are there")
    try:
        schema = pyarrow.parquet.read_schema(path)
        wanted = None if columns is None else list(dict.fromkeys(_column(path, schema.names, name) for name in columns))
        table = pyarrow.parquet.read_table(path, columns=wanted)
    except (OSError, pyarrow.ArrowException) as error:
        raise RowError(f"{path} cannot be read: {error}") from None

    narrow = {field.name: field.type for field in table.schema if _is_narrow(field.type)}
    for row in table.to_pylist():
        yield row | {name: _as_written(row[name], kind) for name, kind in narrow.items()}


def _column(path: Path, there: list[str], name: str) -> str:
    """The column that holds the field `name`, which may be a path into it."""
    for known in (name, name.partition(".")[0]):
        if known in there:
            return known
    raise RowError(f"{path} has no column {name!r}; it has {', '.join(map(repr, there))}")


def _is_narrow(kind: Any) -> bool:
    """Whether floats of less than 64 bits stand in it, whose digits a conversion to float would change."""
    import pyarrow.types as types

    if types.is_struct(kind):
        return any(_is_narrow(kind.field(i).type) for i in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_narrow(kind.value_type)
    return bool(types.is_float32(kind) or types.is_float16(kind))


def _as_written(value: Any, kind: Any) -> Any:
    """A float32 that was written 0.1 is 0.1, not 0.10000000149."""
    import numpy as np
    import pyarrow.types as types

    if value is None:
        return None
    if types.is_struct(kind):
        return {name: _as_written(each, kind.field(name).type) for name, each in value.items()}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_as_written(each, kind.value_type) for each in value]
    if types.is_float32(kind):
        return float(str(np.float32(value)))
    return float(str(np.float16(value))) if types.is_float16(kind) else value


def mended(source: str, rows: Iterable[Values]) -> Iterator[Values]:
    """The rows, with U+FFFD for each half of a surrogate pair, which no tokenizer takes; how many rows had one is said
    once."""
    mender = Mender()
    halves: list[int] = []
    for number, row in enumerate(rows, start=1):
        before = mender.count
        try:
            whole = mender.value(row)
        except RecursionError:
            raise RowError(f"{source}, row {number} is nested too deep") from None
        yield whole

        if mender.count > before:
            halves.append(number)

    if halves:
        text = f"{len(halves)} rows hold half of a surrogate pair (first: row {halves[0]}), read as U+FFFD"
        print(f"{source}: {text}", file=sys.stderr, flush=True)
