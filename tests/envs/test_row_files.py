"""Files of rows as people have them: every form that is valid is read as it is meant, and what is not is named."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from envs.dataset.environment import DatasetFamily, DatasetOptions
from envs.math.datasets import Source, load_problems
from envs.rows import RowError, read_rows

ROOT = Path(__file__).parents[2]
SEPARATORS = ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"]
ROWS = [{"question": "2+2?", "answer": "4"}, {"question": "1+3?", "answer": "5"}]


def values(source: Path | str) -> list[dict[str, Any]]:
    return [dict(row.values) for row in read_rows(str(source))]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("separator", SEPARATORS, ids=lambda text: f"{ord(text):04x}")
def test_a_text_may_hold_any_separator_of_lines(separator: str, tmp_path: Path) -> None:
    row = {"question": f"Two{separator}and two?", "answer": "4"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8", newline="")
    assert values(tmp_path / "a.jsonl") == [row]


def test_a_mark_at_the_beginning_and_the_lines_of_windows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(ROWS).replace(b"\n", b"\r\n"))
    assert values(tmp_path / "a.jsonl") == ROWS


def test_the_locale_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"question": "2 € + 中?", "answer": "4"}\n', encoding="utf-8")
    code = (
        f"from envs.rows import read_rows; print(ascii([r.values for r in read_rows({str(tmp_path / 'a.jsonl')!r})]))"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    said = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True, timeout=120)
    assert said.strip() == ascii([{"question": "2 € + 中?", "answer": "4"}])


FORMS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: lines(ROWS),
    "a.jsonl.gz": lambda: gzip.compress(lines(ROWS)),
    "a.json": lambda: json.dumps(ROWS).encode(),
    "a.json.gz": lambda: gzip.compress(json.dumps(ROWS).encode()),
    "a.csv": lambda: b"question,answer\n2+2?,4\n1+3?,5\n",
    "a.csv.gz": lambda: gzip.compress(b"question,answer\r\n2+2?,4\r\n1+3?,5\r\n"),
}


@pytest.mark.parametrize("name", [*FORMS, "a.parquet"])
@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a device"])
@pytest.mark.parametrize("named", ["itself", "folder", "glob"])
def test_what_is_no_file_is_refused_unopened(
    name: str, kind: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open a pipe waits for who writes to it, which may be nobody."""

    def opened(*_: Any) -> None:
        raise AssertionError("it was opened")

    monkeypatch.setattr(Path, "read_bytes", opened)
    monkeypatch.setattr(pyarrow.parquet, "read_schema", opened)
    path = tmp_path / name
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        monkeypatch.chdir(tmp_path)  # the address of a socket is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(name)

    source = {"itself": path, "folder": tmp_path, "glob": tmp_path / "a.*"}[named]
    with pytest.raises(RowError) as refused:
        values(source)
    fix = "write the rows into a file, and name that in source or eval_source"
    assert str(refused.value) == f"{path} is {kind}, which is not read; {fix}"


@pytest.mark.parametrize("name", FORMS)
def test_each_form_has_the_same_rows(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FORMS[name]())
    assert values(tmp_path / name) == ROWS


def test_a_folder_and_a_glob_are_all_their_files_by_name(tmp_path: Path) -> None:
    for part, row in enumerate(ROWS):
        (tmp_path / f"part-{part}.jsonl").write_bytes(lines([row]))
    (tmp_path / "README.md").write_text("no rows")

    assert values(tmp_path) == values(tmp_path / "part-*.jsonl") == ROWS
    assert [row.where for row in read_rows(str(tmp_path))][1] == f"{tmp_path}/part-1.jsonl, row 1"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b'{"question": "2+2?", "question": "9+9?"}\n', "line 1: the field 'question' stands in it twice"),
        ("a.json", b'[{"a": {"b": 1, "b": 2}}]', "the field 'b' stands in it twice"),
        ("a.json", b'{"question": "2+2?"}', "is no list of objects"),
        ("a.csv", b"question,answer\n2+2?,4,5\n", "more fields than the 2 of the first line"),
        ("a.csv", b'question,answer\n"2+2?"x,4\n', "line 2 is not CSV"),
        ("a.csv", b"question,answer,answer\n2+2?,4,5\n", "the field 'answer' stands twice"),
        ("a.jsonl", b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}\n", "1 is nested too deep"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20, "cannot be read"),
        ("a.jsonl", b'{"question": "\xff"}\n', "cannot be read"),
        ("a.txt", b"2+2?", "is no file of rows; these can be read: .jsonl"),
    ],
)
def test_what_is_not_valid_is_one_line(name: str, data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RowError) as raised:
        values(tmp_path / name)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_table_with_an_index_and_long_fields_is_read(tmp_path: Path) -> None:
    """As pandas writes it: the first column has no name."""
    (tmp_path / "a.csv").write_text(f",question,answer\n0,{'q' * 200_000},4\n")
    (row,) = values(tmp_path / "a.csv")
    assert row == {"": "0", "question": "q" * 200_000, "answer": "4"}


def test_half_an_emoji_is_replaced_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "2 \\ud83d?"}\n{"q": ["\\ud83d\\ude00", "\\ude00"]}\n{"q": "whole"}\n')
    assert values(tmp_path / "a.jsonl") == [{"q": "2 \ufffd?"}, {"q": ["\U0001f600", "\ufffd"]}, {"q": "whole"}]
    assert "2 rows hold half of a surrogate pair (first: row 1)" in capsys.readouterr().err


def test_float32_is_read_as_it_was_written(tmp_path: Path) -> None:
    scores = pyarrow.array([0.1, None], pyarrow.float32())
    nested = pyarrow.array([{"each": [0.3, 1e-7]}, None], pyarrow.struct({"each": pyarrow.list_(pyarrow.float32())}))
    pyarrow.parquet.write_table(pyarrow.table({"score": scores, "nested": nested}), tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == [
        {"score": 0.1, "nested": {"each": [0.3, 1e-7]}},
        {"score": None, "nested": None},
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_field_may_be_a_path(name: str, tmp_path: Path) -> None:
    rows = [{"prompt": "2+2?", "reward_model": {"ground_truth": "4"}}]
    if name == "a.jsonl":
        (tmp_path / name).write_bytes(lines(rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)

    source = Source(str(tmp_path / name), question_field="prompt", answer_field="reward_model.ground_truth")
    assert [problem.answer for problem in load_problems(source)] == ["4"]
    family = dataset(tmp_path / name, answer_field="reward_model.ground_truth")
    assert family.task("train", 0).gold == "4"


def dataset(source: Path, **options: Any) -> DatasetFamily:
    return DatasetFamily(DatasetOptions(source=str(source), reward={"exact": 1.0}, eval_count=0, **options), seed=0)


@pytest.mark.parametrize("answer", ["null", "NaN", '""', '" "', "[]", None], ids=str)
def test_a_row_without_an_answer_is_refused_with_row_and_field(answer: str | None, tmp_path: Path) -> None:
    """`"answer": null` with the reward `exact` paid for the text "None"."""
    field = "" if answer is None else f', "answer": {answer}'
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "1?", "answer": "1"}}\n{{"prompt": "2?"{field}}}\n')

    for load in (
        lambda: dataset(tmp_path / "a.jsonl"),
        lambda: load_problems(Source(str(tmp_path / "a.jsonl"), question_field="prompt")),
    ):
        with pytest.raises(RowError, match=r"a.jsonl, row 2.*'answer'"):
            load()


@pytest.mark.parametrize("written", ["NaN", "nan", "null", "None", "inf", "NA", "007", "1e3", "4.50"])
def test_fields_of_csv_are_texts_whatever_they_spell(written: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"prompt,answer\n1?,1\n2?,{written}\n")
    family = dataset(tmp_path / "a.csv")
    task = family.task("train", 1)
    assert task.gold == written and json.loads(task.row)["answer"] == written
    assert [each.answer for each in load_problems(Source(str(tmp_path / "a.csv"), "prompt"))] == ["1", written]


@pytest.mark.parametrize("line", ["2?,", '2?," "', "2?"])
def test_a_field_of_csv_that_is_empty_or_missing_is_no_answer(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"prompt,answer\n1?,1\n{line}\n")
    said = r"a\.csv, row 2, field 'answer': .* is no answer; give the row one, or leave the row out"
    for load in (
        lambda: dataset(tmp_path / "a.csv"),
        lambda: load_problems(Source(str(tmp_path / "a.csv"), question_field="prompt")),
    ):
        with pytest.raises(RowError, match=said):
            load()


def test_a_list_is_no_answer_that_exact_could_compare(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "roots?", "answer": ["3", "5"]}\n')
    with pytest.raises(RowError, match="'exact' compares texts and numbers, and this is a list; write a reward"):
        dataset(tmp_path / "a.jsonl")


def test_decimals_are_answers(tmp_path: Path) -> None:
    answers = pyarrow.array([Decimal("4.50")], pyarrow.decimal128(3, 2))
    pyarrow.parquet.write_table(pyarrow.table({"question": ["?"], "answer": answers}), tmp_path / "a.parquet")
    assert [problem.answer for problem in load_problems(Source(str(tmp_path / "a.parquet")))] == ["4.50"]
