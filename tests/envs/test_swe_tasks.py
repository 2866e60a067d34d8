"""Published schemas on rows in their real form, errors that name row and field, and diffs turned round."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.rows import Row, RowError
from envs.swe.diffs import DiffError, reverse_diff
from envs.swe.environment import SweFamily, SweOptions
from envs.swe.harness.apply_diff import is_protected, is_test_file
from envs.swe.tasks import file_diff, load_tasks, parse_task, to_row
from tests.envs.errors import raises_one_line

PATCH = """diff --git a/src/marshmallow/fields.py b/src/marshmallow/fields.py
--- a/src/marshmallow/fields.py
+++ b/src/marshmallow/fields.py
@@ -1474,7 +1474,7 @@ def _serialize(self, value, attr, obj, **kwargs):
         if value is None:
             return None
         base_unit = dt.timedelta(**{self.precision: 1})
-        return int(value.total_seconds() / base_unit.total_seconds())
+        return round(value.total_seconds() / base_unit.total_seconds())
 
     def _deserialize(self, value, attr, data, **kwargs):
         try:
"""
TEST_PATCH = """diff --git a/tests/test_serialization.py b/tests/test_serialization.py
--- a/tests/test_serialization.py
+++ b/tests/test_serialization.py
@@ -782,1 +782,2 @@ def test_timedelta_field(self, user):
         assert field.serialize("d1", user) == 1
+        assert field.serialize("d6", user) == 12346
"""
TEST = "tests/test_serialization.py::TestFieldSerialization::test_timedelta_field"
KEPT = ["tests/test_serialization.py::TestFieldSerialization::test_number[String-42]", "tests/test_fields.py::test_a b"]
BENCH: dict[str, Any] = {
    "repo": "marshmallow-code/marshmallow",
    "instance_id": "marshmallow-code__marshmallow-1359",
    "base_commit": "b40a0f4e33823e6d0f341f7e8684e359a99060d1",
    "patch": PATCH,
    "test_patch": TEST_PATCH,
    "problem_statement": "TimeDelta serialization precision",
    "hints_text": "",
    "created_at": "2019-09-05T21:57:00Z",
    "version": "3.0",
    "FAIL_TO_PASS": json.dumps([TEST]),
    "PASS_TO_PASS": json.dumps(KEPT),
    "environment_setup_commit": "8b3a32614fd4a74e93e9a63a042e74c1fea34466",
}
VERIFIED = BENCH | {"difficulty": "15 min - 1 hour"}
GYM = BENCH | {"FAIL_TO_PASS": [TEST], "PASS_TO_PASS": KEPT}
REBENCH = GYM | {
    "install_config": {"python": "3.9", "install": "pip install -e .[dev]", "test_cmd": "pytest --no-header -rA"},
    "docker_image": "swerebench/sweb.eval.x86_64.marshmallow-code_1776_marshmallow-1359",
    "license_name": "MIT",
    "FAIL_TO_FAIL": [],
    "PASS_TO_FAIL": [],
    "meta": {"num_modified_files": 1},
}
SMITH = {
    "instance_id": "oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc",
    "patch": PATCH,
    "FAIL_TO_PASS": [TEST],
    "PASS_TO_PASS": KEPT,
    "created_at": "",
    "image_name": "jyangballin/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536",
    "repo": "swesmith/oauthlib__oauthlib.1fd52536",
    "problem_statement": "It rounds the wrong way.",
}
R2E_FILES = [
    {"header": {"file": {"path": "aiohttp/a.py"}}, "old_file_content": "a\nb\n", "new_file_content": "a\nc\n"},
    {"header": {"file": {"path": "tests/test_a.py"}}, "old_file_content": "", "new_file_content": "x\n"},
]
R2E = {
    "repo_name": "aiohttp",
    "docker_image": "namanjain12/aiohttp_final:006fbc37",
    "commit_hash": "006fbc3711ebe75a",
    "problem_statement": "[ISSUE]\nIt fails.\n[/ISSUE]",
    "modified_files": ["aiohttp/a.py"],
    "prompt": "",
    "expected_output_json": json.dumps({"TestA.test_one": "PASSED", "test_two": "FAILED", "test_three[x]": "PASSED"}),
    "parsed_commit_content": json.dumps({"old_commit_hash": "1", "new_commit_hash": "2", "file_diffs": R2E_FILES}),
}
ROWS = {"swe-bench": BENCH, "swe-gym": GYM, "swe-rebench": REBENCH, "swe-smith": SMITH, "r2e-gym": R2E}


@pytest.mark.parametrize("schema", ROWS)
def test_every_schema_becomes_the_same_task(schema: str) -> None:
    task = parse_task(Row(ROWS[schema], "row 1"))
    assert task.schema == schema
    if schema == "r2e-gym":
        assert (task.fail_to_pass, task.pass_to_pass) == (("TestA.test_one", "test_three[x]"), ())
        assert task.gold_patch == file_diff("aiohttp/a.py", "a\nb\n", "a\nc\n") and "tests/" not in task.gold_patch
        assert (task.image, task.base_commit) == ("namanjain12/aiohttp_final:006fbc37", "006fbc3711ebe75a")
        return

    assert (task.fail_to_pass, task.pass_to_pass) == ((TEST,), tuple(KEPT))
    if schema == "swe-smith":
        assert task.bug_patch == PATCH and task.gold_patch == reverse_diff(PATCH) and not task.test_patch
        assert "+        return int(" in task.gold_patch
    else:
        assert (task.gold_patch, task.test_patch, task.bug_patch) == (PATCH, TEST_PATCH, "")
        assert task.base_commit == BENCH["base_commit"]


def test_images() -> None:
    names = {schema: parse_task(Row(row, "")).image for schema, row in ROWS.items()}
    assert names["swe-bench"] == "swebench/sweb.eval.x86_64.marshmallow-code_1776_marshmallow-1359:latest"
    assert names["swe-gym"] == "xingyaoww/sweb.eval.x86_64.marshmallow-code_s_marshmallow-1359:latest"
    assert names["swe-rebench"] == REBENCH["docker_image"] and names["swe-smith"] == SMITH["image_name"]
    assert parse_task(Row(VERIFIED, "")) == parse_task(Row(BENCH, ""))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": 1}, "row 9 is of no known schema"),
        (BENCH | {"FAIL_TO_PASS": "[1]"}, "row 9, field 'FAIL_TO_PASS': [1] is not a list of texts"),
        (BENCH | {"FAIL_TO_PASS": "tests/a.py"}, "field 'FAIL_TO_PASS': 'tests/a.py' is not JSON"),
        (GYM | {"FAIL_TO_PASS": []}, "field 'FAIL_TO_PASS': is empty"),
        (GYM | {"PASS_TO_PASS": 3}, "field 'PASS_TO_PASS': 3 is not a list of texts"),
        (BENCH | {"patch": "fix it"}, "field 'patch': is not a unified diff"),
        (BENCH | {"base_commit": None}, "field 'base_commit': is missing"),
        (
            {key: value for key, value in BENCH.items() if key != "problem_statement"},
            "has no field 'problem_statement'",
        ),
        (SMITH | {"patch": PATCH[:-60]}, "field 'patch': a hunk ends before its counted lines"),
        (R2E | {"expected_output_json": "{}"}, "field 'expected_output_json': no test is expected to pass"),
        (R2E | {"docker_image": None}, "has no field 'docker_image'"),
        (R2E | {"parsed_commit_content": '{"file_diffs": [{}]}'}, "a file difference has no path"),
    ],
)
def test_bad_rows_name_row_and_field(row: dict[str, Any], message: str) -> None:
    with raises_one_line(RowError, message, "row 9"):
        parse_task(Row(row, "row 9"))


def test_files(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in (BENCH, SMITH, R2E)))
    assert [task.schema for task in load_tasks(str(source))] == ["swe-bench", "swe-smith", "r2e-gym"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([REBENCH]), tmp_path / "a.parquet")
    assert load_tasks(str(tmp_path / "a.parquet")) == [parse_task(Row(REBENCH, ""))]
    source.write_text(f"{json.dumps(BENCH)}\n{json.dumps(BENCH)}\n")
    with pytest.raises(RowError, match="occurs twice"):
        load_tasks(str(source))
    source.write_text("{}\n")
    with pytest.raises(RowError, match=r"a.jsonl, row 1 is of no known schema"):
        load_tasks(str(source))


def test_a_generated_task_survives_its_file() -> None:
    task = parse_task(Row(SMITH | {"package": "toolz", "image_name": ""}, "row"))
    assert parse_task(Row(to_row(task), "row")) == task and task.image is None


TEXT = st.lists(st.sampled_from(["a", "b", "", "--- x", "+++ y", "@@ -1 +1 @@", "-", "+", "\\"]), max_size=8)


@given(TEXT, TEXT, st.booleans())
def test_reversed_diffs_undo(old: list[str], new: list[str], ends: bool) -> None:
    texts = ["\n".join(lines) + ("\n" if ends and lines else "") for lines in (old, new)]
    diff = file_diff("f.txt", *texts)
    assert reverse_diff(reverse_diff(diff)) == diff
    assert (texts[0] == texts[1]) == (diff == "")


@pytest.mark.parametrize(
    ("old", "new"), [("a\nb\n", "a\nc\n"), ("", "new\n"), ("gone\n", ""), ("a", "b\n"), ("x\n" * 9, "x\n" * 4)]
)
def test_git_applies_diffs_and_their_reverse(tmp_path: Path, old: str, new: str) -> None:
    def content() -> str:
        return (tmp_path / "f").read_text() if (tmp_path / "f").exists() else ""

    if old:
        (tmp_path / "f").write_text(old)
    diff = file_diff("f", old, new)
    for text, expected in ((diff, new), (reverse_diff(diff), old)):
        subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=text.encode(), check=True)
        assert content() == expected


def test_diffs_that_cannot_be_reversed() -> None:
    for text in ("--- a/x\n", "@@ -1 +1 @@\n", "@@ -1 +1 @@\n?x\n", "GIT binary patch\nliteral 1\n"):
        with pytest.raises(DiffError):
            reverse_diff(text)


PROTECTED = """
testing.py src/shop/testing.py shop/_testing.py conftest_helpers.py
testutils.py shop/testhelpers.py shop/testsuite/run.py shop/testcase.py shop/basetest.py shop/unittest.py
tests/x.py pkg/test/data.txt test_a.py a/b_test.py conftest.py a/conftest.py setup.cfg pyproject.toml tox.ini pytest.ini
sitecustomize.py x.pth a/__pycache__/b.pyc pytest.py _pytest/x.py json.py random/__init__.py src/re.py .gitattributes
x.egg-info/entry_points.txt sub/.git/config lib.so
"""
FREE = "toolz/itertoolz.py pkg/json.py src/pkg/re.py README.md contest.py latest/a.py attesting.py shop/testify.py"


def test_protected_paths() -> None:
    for path in PROTECTED.split():
        assert is_protected(path, ("", "src")), path
    for path in FREE.split():
        assert not is_protected(path, ("", "src")), path
    assert is_test_file("a/Tests/b.py") and not is_test_file("a/attest.py")


PUT_BACK = ["src/_pytest/python.py", "src/attr/_make.py", "src/packaging/version.py", "src/iniconfig/__init__.py"]


@pytest.mark.parametrize("path", PUT_BACK)
def test_a_task_whose_fix_would_be_put_back_is_left_out_by_name(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It could never be solved, and nobody was told."""
    own = BENCH | {"instance_id": "own__fix-1", "patch": file_diff(path, "a = 1\n", "a = 2\n")}
    source = tmp_path / "a.jsonl"
    source.write_text(f"{json.dumps(BENCH)}\n{json.dumps(own)}\n{json.dumps(GYM | {'instance_id': 'b'})}\n")

    family = SweFamily(SweOptions(source=str(source), eval_count=1), seed=0)
    assert (family.task_count("train"), family.task_count("eval")) == (1, 1)
    said = capsys.readouterr().err
    assert f"1 of 3 tasks are left out: their fix changes what their tests are run with (own__fix-1: {path})" in said

    source.write_text(json.dumps(own))
    with raises_one_line(RowError, "1 of 1 tasks are left out", "name another source"):
        SweFamily(SweOptions(source=str(source), eval_count=0), seed=0)
