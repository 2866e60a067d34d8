"""Rows as functions of a user's own and careless tools make them: read, or refused by row and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.dataset.environment import DatasetFamily, DatasetOptions
from envs.math.datasets import Source, load_problems
from envs.rows import Row, RowError, read_rows
from envs.workers.serving import told

GOOD = '{"prompt": "2+2?", "question": "2+2?", "answer": "4"}\n'
MADE: list[Any] = []
"""What `made` gives."""


def made() -> Any:
    return MADE[0]


SOURCE = f"{__name__}:made"


def family(source: str) -> DatasetFamily:
    return DatasetFamily(DatasetOptions(source=source, eval_count=1, reward={"exact": 1.0}), 0)


@pytest.fixture
def of_function() -> Any:
    def give(value: Any) -> str:
        MADE[:] = [value]
        return SOURCE

    return give


def test_half_a_character_of_a_function_is_mended_and_told(
    of_function: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "a \ud83d", "question": "a \ud83d", "answer": "4 \ud83d"}] * 2
    task = family(of_function(rows)).task("train", 0)
    assert (task.opening[0].content, task.gold) == ("a \ufffd", "4 \ufffd")
    assert load_problems(Source(SOURCE))[0].question == "a \ufffd"
    assert "2 rows hold half of a surrogate pair" in capsys.readouterr().err


def test_json_within_a_text_is_read_as_rows_are() -> None:
    row = Row({"tests": '{"a": "\\ud83d"}', "twice": '{"a": 1, "a": 2}', "deep": "[" * 2000 + "]" * 2000}, "f, row 1")
    assert row.json("tests") == {"a": "\ufffd"}
    for field, why in (("twice", "'a' stands in it twice"), ("deep", "is nested too deep")):
        with pytest.raises(RowError, match=f"f, row 1, field '{field}'.*({why})"):
            row.json(field)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (float("inf"), "inf is no answer"),
        (np.float32("nan"), "is no answer"),
        (True, "is a bool"),
        (np.array([1, 2]), "is a ndarray"),
        (np.int64(4), "is a int64"),
    ],
)
def test_a_gold_answer_that_is_no_text_or_number_is_named(of_function: Any, answer: Any, said: str) -> None:
    source = of_function([{"prompt": "q", "answer": answer}] * 2)
    with pytest.raises(RowError, match=f"row 1, field 'answer': .*{said}"):
        family(source)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "gave a NoneType, not rows"),
        ([{"prompt": "q", "answer": "4", 5: "x"}] * 2, "row 1 cannot be written as JSON"),
        ([{"prompt": None, "answer": "4"}] * 2, "row 1 has no field 'prompt'; it has 'answer'$"),
    ],
)
def test_rows_that_cannot_be_used_are_named(of_function: Any, rows: Any, said: str) -> None:
    with pytest.raises(RowError, match=said):
        family(of_function(rows))


def test_a_question_that_is_missing_is_not_called_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"question": None, "answer": "4"}))
    with pytest.raises(RowError, match="field 'question': None is not a text"):
        load_problems(Source(str(path)))


def test_files_behind_one_another_and_hidden_ones_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(2 * ("\ufeff" + GOOD).encode())
    (tmp_path / "._a.jsonl").write_bytes(b"\x00\x05\x16\xff")
    assert len(list(read_rows(str(tmp_path)))) == 2


def test_an_exception_is_told_whatever_it_says_of_itself() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert told(ValueError("half \ud83d")) == "ValueError: half \ufffd"
    assert len(told(ValueError("x" * 10**6))) < 3000
    assert told(Mute()).startswith("Mute: ")
