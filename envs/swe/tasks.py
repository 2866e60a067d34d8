"""One typed task, and the published files it comes from, each with its own rules.

| data set              | FAIL_TO_PASS     | `patch`              | peculiar                                        |
|-----------------------|------------------|----------------------|-------------------------------------------------|
| SWE-bench (Verified)  | JSON in a string | fixes                | image by a naming rule (`__` → `_1776_`)        |
| SWE-Gym               | list             | fixes                | image by a naming rule (`__` → `_s_`)           |
| SWE-smith             | list             | *introduces* the bug | no `test_patch`: the repository has the tests   |
| SWE-rebench           | list             | fixes                | `docker_image`, `image_name` or `install_config`|
| R2E-Gym               | –                | –                    | `expected_output_json`, `parsed_commit_content` |
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

from envs.rows import Row, RowError, read_rows
from envs.swe.diffs import DiffError, reverse_diff
from envs.swe.harness.apply_diff import is_test_file
from envs.swe.runners import RunnerName, changed_tests, files_of, has_file, is_progress, runner_of

Schema = Literal["swe-bench", "swe-gym", "swe-smith", "swe-rebench", "r2e-gym"]


@dataclass(frozen=True)
class SweTask:
    """What the agent gets is the repository at `base_commit`, with `bug_patch` applied where there is one."""

    instance_id: str
    repo: str
    schema: Schema
    problem_statement: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    gold_patch: str
    """The fix, for the repository as the agent gets it; empty where the data set has none."""
    bug_patch: str = ""
    test_patch: str = ""
    """Brings the tests, after the agent's work."""
    base_commit: str = ""
    image: str | None = None
    package: str = ""
    """The package of a generated task: a name in envs/swe/packages.py."""
    runner: RunnerName = "pytest"

    @property
    def test_files(self) -> tuple[str, ...]:
        """What to run; the other runners' test names have no files."""
        if self.runner == "pytest":
            return files_of((*self.fail_to_pass, *self.pass_to_pass))
        return changed_tests(self.runner, self.test_patch)


def load_tasks(source: str, subset: str | None = None, split: str = "train") -> list[SweTask]:
    """All tasks of a `.jsonl`, `.parquet` or hub source; each row in the form that its fields show. Raises RowError."""
    tasks = [parse_task(row) for row in read_rows(source, subset, split)]
    if not tasks:
        raise RowError(f"{source} has no rows")

    seen: set[str] = set()
    for task in tasks:
        if task.instance_id in seen:
            raise RowError(f"{source}: instance_id {task.instance_id!r} occurs twice")
        seen.add(task.instance_id)
    return tasks


def schema_of(row: Row) -> Schema:
    """Raises RowError for a row of no known schema."""
    if row.has("expected_output_json"):
        return "r2e-gym"
    if row.has("patch") and row.has("instance_id"):
        if "test_patch" not in row.values:
            return "swe-smith"
        if row.has("install_config") or row.has("docker_image") or row.has("image_name"):
            return "swe-rebench"
        return "swe-bench" if isinstance(row.values.get("FAIL_TO_PASS"), str) else "swe-gym"
    raise RowError(
        f"{row.where} is of no known schema: needs 'instance_id' and 'patch', or 'expected_output_json'; "
        f"it has {', '.join(map(repr, row.values))}"
    )


def parse_task(row: Row) -> SweTask:
    """Raises RowError naming the row and the field."""
    schema = schema_of(row)
    if schema == "r2e-gym":
        return _r2e_gym(row)

    smith = schema == "swe-smith"
    repo = row.text("repo")
    fail_to_pass = _tests(row, "FAIL_TO_PASS")
    if not fail_to_pass:
        row.fail("FAIL_TO_PASS", "is empty: nothing would tell a fix")

    task = SweTask(
        instance_id=row.text("instance_id"),
        repo=repo,
        schema=schema,
        problem_statement=row.text("problem_statement", default="" if smith else None),
        fail_to_pass=fail_to_pass,
        pass_to_pass=_tests(row, "PASS_TO_PASS", default=[]),
        gold_patch=_diff(row, "patch"),
        base_commit=row.text("base_commit", default=""),
        runner=_runner(row, repo, fail_to_pass),
    )

    if smith:
        try:
            gold_patch = reverse_diff(task.gold_patch)
        except DiffError as error:
            row.fail("patch", str(error))
        image = row.text("image_name", default="") or None
        package = row.text("package", default="")
        return replace(task, gold_patch=gold_patch, bug_patch=task.gold_patch, image=image, package=package)

    if not task.base_commit:
        row.fail("base_commit", "is missing: the repository's state is unknown")
    return replace(task, test_patch=_diff(row, "test_patch"), image=_image(row, schema))


def to_row(task: SweTask) -> dict[str, object]:
    """A generated task in SWE-smith's schema, with the package beside it."""
    return {
        "instance_id": task.instance_id,
        "repo": task.repo,
        "patch": task.bug_patch,
        "FAIL_TO_PASS": list(task.fail_to_pass),
        "PASS_TO_PASS": list(task.pass_to_pass),
        "problem_statement": task.problem_statement,
        "image_name": task.image or "",
        "created_at": "",
        "package": task.package,
    }


def _r2e_gym(row: Row) -> SweTask:
    """Every test expected to pass must; which of them failed before is not told, so all are FAIL_TO_PASS."""
    expected = row.json("expected_output_json")
    if not isinstance(expected, dict):
        row.fail("expected_output_json", "is not an object of test: outcome")
    passing = tuple(name for name, outcome in expected.items() if outcome == "PASSED")
    if not passing:
        row.fail("expected_output_json", "no test is expected to pass")

    repo = row.text("repo_name", "repo")
    commit = row.text("commit_hash", "base_commit")

    return SweTask(
        instance_id=row.text("instance_id", default=f"{repo}-{commit[:12]}"),
        repo=repo,
        schema="r2e-gym",
        problem_statement=row.text("problem_statement"),
        fail_to_pass=passing,
        pass_to_pass=(),
        gold_patch=_commit_diff(row),
        base_commit=commit,
        image=row.text("docker_image"),
    )


def _commit_diff(row: Row) -> str:
    """A diff of the commit's files that are no tests, from their whole contents; empty where they are not given."""
    if not row.has("parsed_commit_content"):
        return ""
    content = row.json("parsed_commit_content")
    files = content.get("file_diffs") if isinstance(content, dict) else None
    if not isinstance(files, list):
        row.fail("parsed_commit_content", "has no list 'file_diffs'")

    parts = []
    for file in files:
        try:
            path = file["header"]["file"]["path"]
            old = file.get("old_file_content") or ""
            new = file.get("new_file_content") or ""
        except (KeyError, TypeError, AttributeError):
            row.fail("parsed_commit_content", "a file difference has no path")
        if not is_test_file(path):
            parts.append(file_diff(path, old, new))
    return "".join(parts)


def file_diff(path: str, old: str, new: str) -> str:
    """A unified difference in git's form; a file whose content is empty on one side is created or deleted."""
    if old == new:
        return ""
    sides = (old.splitlines(keepends=True), new.splitlines(keepends=True))
    names = (f"a/{path}" if old else "/dev/null", f"b/{path}" if new else "/dev/null")
    lines = difflib.unified_diff(*sides, *names)

    head = f"diff --git a/{path} b/{path}\n"
    head += "" if old else "new file mode 100644\n"
    head += "" if new else "deleted file mode 100644\n"
    return head + "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _tests(row: Row, name: str, default: list[str] | None = None) -> tuple[str, ...]:
    return tuple(test for test in row.strings(name, default=default) if not is_progress(test))


def _runner(row: Row, repo: str, fail_to_pass: tuple[str, ...]) -> RunnerName:
    """Raises RowError where no file can be known to have the tests: nothing would ever be rewarded."""
    fileless = [test for test in fail_to_pass if not has_file(test)]
    runner = runner_of(repo) if fileless else "pytest"
    if runner == "pytest" and fileless:
        row.fail("FAIL_TO_PASS", f"{fileless[0]!r} names no file, and the tests of {repo} are run by pytest")
    if runner != "pytest" and not changed_tests(runner, row.text("test_patch", default="")):
        row.fail("test_patch", f"changes no test file, so that {fileless[0]!r} of FAIL_TO_PASS is nowhere to be found")
    return runner


def _diff(row: Row, name: str) -> str:
    text = row.text(name)
    if "\n@@ " not in text and "GIT binary patch" not in text and "\nrename from " not in text:
        row.fail(name, "is not a unified diff")
    return text if text.endswith("\n") else f"{text}\n"


def _image(row: Row, schema: Schema) -> str:
    named = row.text("docker_image", "image_name", default="")
    if named:
        return named
    instance = row.text("instance_id").lower()
    if schema == "swe-gym":
        return f"xingyaoww/sweb.eval.x86_64.{instance.replace('__', '_s_')}:latest"
    return f"swebench/sweb.eval.x86_64.{instance.replace('__', '_1776_')}:latest"
