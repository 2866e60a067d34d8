"""Maths problems from JSONL, parquet or a hub, with gold answers extracted once, when they are loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.math.answers import MAX_ANSWER_CHARS, last_box
from envs.math.problems import Problem


class DatasetError(ValueError):
    """A source that cannot be read, or a row without question or answer; names the row and the field."""


@dataclass(frozen=True)
class Source:
    """Where problems come from: a path ending in .jsonl or .parquet, or a hub name with subset and split."""

    name: str
    question_field: str = "question"
    answer_field: str = "answer"
    subset: str | None = None
    split: str = "train"


def load_problems(source: Source) -> list[Problem]:
    """All problems of a source, in its order. Raises DatasetError."""
    path = Path(source.name)
    if path.suffix == ".jsonl":
        rows: Iterable[Mapping[str, Any]] = _jsonl(path)
    elif path.suffix == ".parquet":
        rows = _parquet(path, source)
    elif path.exists():
        raise DatasetError(f"{path} is neither .jsonl nor .parquet")
    else:
        rows = _hub(source)
    problems = [_problem(row, source, number) for number, row in enumerate(rows, start=1)]
    if not problems:
        raise DatasetError(f"{source.name} has no rows")
    return problems


def gold_answer(text: str) -> str:
    """The bare answer: after `####` (GSM8K), in the last box of a solution (MATH), or the text as it stands.

    Raises ValueError if that is empty or too long to be an answer.
    """
    if "####" in text:
        answer = text.rpartition("####")[2].strip()
    elif "\\boxed" in text:
        answer = last_box(text) or ""
    else:
        answer = text.strip()
    if not answer:
        raise ValueError("no answer after '####' or in a closed \\boxed{}" if text.strip() else "is empty")
    if len(answer) > MAX_ANSWER_CHARS:
        raise ValueError(f"{len(answer)} characters and neither '####' nor \\boxed{{}}: not an answer")
    return answer


def _problem(row: Mapping[str, Any], source: Source, number: int) -> Problem:
    where = f"{source.name}, row {number}"
    question = _field(row, source.question_field, where)
    answer = _field(row, source.answer_field, where)
    try:
        return Problem(question, gold_answer(answer))
    except ValueError as error:
        raise DatasetError(f"{where}, field {source.answer_field!r}: {error}") from None


def _field(row: Mapping[str, Any], field: str, where: str) -> str:
    if field not in row:
        raise DatasetError(f"{where} has no field {field!r}; it has {', '.join(map(repr, row))}")
    value = row[field]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise DatasetError(f"{where}, field {field!r}: {value!r} is not a text")
    return value


def _jsonl(path: Path) -> list[Mapping[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from None
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DatasetError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DatasetError(f"{path}, line {number} is not an object")
        rows.append(row)
    return rows


def _parquet(path: Path, source: Source) -> list[Mapping[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    fields = [source.question_field, source.answer_field]
    try:
        columns = pyarrow.parquet.read_schema(path).names
        missing = [field for field in fields if field not in columns]
        if missing:
            raise DatasetError(f"{path} has no column {missing[0]!r}; it has {', '.join(map(repr, columns))}")
        return pyarrow.parquet.read_table(path, columns=fields).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from None


def _hub(source: Source) -> Iterable[Mapping[str, Any]]:
    try:
        import datasets
    except ImportError:
        raise DatasetError(f"{source.name!r} is no file, and hub datasets need `pip install datasets`") from None
    try:
        return datasets.load_dataset(source.name, source.subset, split=source.split)
    except Exception as error:  # of the hub's client: network, names, subsets, scripts
        what = f"{source.name}:{source.subset}" if source.subset else source.name
        raise DatasetError(
            f"{what!r} ({source.split}) is no file and did not load from the hub: {type(error).__name__}: {error}"
        ) from error
