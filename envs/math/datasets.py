"""Maths problems from rows of a data set, with gold answers extracted once, when they are loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from envs.math.answers import MAX_ANSWER_CHARS, last_box, typed
from envs.math.problems import Problem
from envs.rows import Row, RowError, read_rows


@dataclass(frozen=True)
class Source:
    """Where problems come from: files, or a hub name with subset and split. A field may be a path."""

    name: str
    question_field: str = "question"
    answer_field: str = "answer"
    subset: str | None = None
    split: str = "train"
    type_field: str | None = None


def load_problems(source: Source) -> list[Problem]:
    """All problems of a source, in its order. Raises RowError, naming the row and the field."""
    columns = [source.question_field, source.answer_field, *([source.type_field] if source.type_field else [])]
    problems = [_problem(row, *columns) for row in read_rows(source.name, source.subset, source.split, columns)]
    if not problems:
        raise RowError(f"{source.name} has no rows")
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


def _problem(row: Row, question_field: str, answer_field: str, type_field: str = "") -> Problem:
    question = _text(row, question_field, row.get(question_field))
    text = _text(row, answer_field, row.gold(answer_field))
    asked = row.text(type_field, default="") if type_field else ""
    try:
        answer = gold_answer(text)
    except ValueError as error:
        row.fail(answer_field, str(error))

    try:
        typed(answer, asked)
    except ValueError as error:
        row.fail(type_field, str(error))
    return Problem(question, answer, asked=asked)


def _text(row: Row, field: str, value: Any) -> str:
    """A text; answers also come as a number, or as a list of one."""
    if value is None and field not in row.values:
        row.miss(field)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, int | Decimal) or (isinstance(value, float) and math.isfinite(value)):
        value = str(value) if not isinstance(value, bool) else value
    if not isinstance(value, str) or not value.strip():
        row.fail(field, f"{value!r} is not a text")
    return value
