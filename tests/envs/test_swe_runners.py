# ruff: noqa: E501 (what an agent types stands as it would type it)
"""Rows of Django and SymPy, whose tests pytest's ids do not name: read, run by their own runners, and not to be fooled."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from envs.rows import Row, RowError
from envs.sandbox import Limits
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.swe.checkout import Checkout
from envs.swe.checkout_cache import CheckoutCache
from envs.swe.evaluate import DiffResult, evaluate, run_tests
from envs.swe.harness import apply_diff
from envs.swe.harness.apply_diff import is_protected
from envs.swe.runners import RUNNERS, as_published, protected_paths, share_passed
from envs.swe.tasks import SweTask, file_diff, load_tasks, parse_task
from tests.envs.agents import agents_work
from tests.envs.errors import raises_one_line
from tests.envs.repositories import write_files
from tests.envs.runner_repositories import DJANGO, DJANGO_BUG, SYMPY, SYMPY_BUG
from tests.envs.sandboxes import sh

LIMITS = Limits(timeout_s=60, output_bytes=4 << 20)
SCRIPTS = Path(apply_diff.__file__).parent
REPOSITORIES = {"django": (DJANGO, DJANGO_BUG), "sympy": (SYMPY, SYMPY_BUG)}


def row(runner: str, touched: list[str], fail_to_pass: list[str], pass_to_pass: list[str]) -> dict[str, Any]:
    """As SWE-bench publishes it. The repository has the tests but for one line, which the test patch brings."""
    files, bug = REPOSITORIES[runner]
    return {
        "repo": f"{runner}/{runner}",
        "instance_id": f"{runner}__{runner}-11099",
        "base_commit": "d26b2424",
        "patch": "".join(file_diff(path, text, files[path]) for path, text in bug.items()),
        "test_patch": "".join(file_diff(path, files[path], f"{files[path]}# more\n") for path in touched),
        "problem_statement": "It is wrong.",
        "hints_text": "",
        "created_at": "2019-03-20",
        "version": "3.0",
        "FAIL_TO_PASS": json.dumps(fail_to_pass),
        "PASS_TO_PASS": json.dumps(pass_to_pass),
        "environment_setup_commit": "419a78300f7cd27611196e1e464d50fd0385ff27",
    }


DJANGO_ROW = row(
    "django",
    ["tests/text_tests/tests.py", "tests/test_sqlite.py"],
    ["Only the first letter is changed.", "test_parts (text_tests.tests.ShortenTests)"],
    [
        "test_capfirst (text_tests.tests.CapTests)",
        "test_empty (text_tests.tests.CapTests.test_empty)",
        "test_short (text_tests.tests.ShortenTests)",
        "Shared by two tests",
    ],
)
NUMBERS = "sympy/core/tests/test_numbers.py"
MORE = "sympy/core/tests/test_more.py"
SYMPY_ROW = row("sympy", [NUMBERS, MORE], ["test_gcd", "test_shared", "test_more"], ["test_inverse"])
ROWS = {"django": DJANGO_ROW, "sympy": SYMPY_ROW}


def test_rows() -> None:
    django, sympy = (parse_task(Row(each, "row 1")) for each in (DJANGO_ROW, SYMPY_ROW))
    assert (django.runner, django.test_files) == ("django", ("tests/text_tests/tests.py",))
    assert (sympy.runner, sympy.test_files) == ("sympy", (NUMBERS, MORE))
    assert django.fail_to_pass[0] == "Only the first letter is changed."
    gone = SYMPY_ROW | {"test_patch": SYMPY_ROW["test_patch"] + file_diff("sympy/core/tests/test_gone.py", "x\n", "")}
    assert parse_task(Row(gone, "")).test_files == (NUMBERS, MORE), "a file that the patch deletes has no tests"
    by_file = SYMPY_ROW | {"FAIL_TO_PASS": json.dumps([f"{NUMBERS}::test_gcd"]), "PASS_TO_PASS": "[]"}
    assert (parse_task(Row(by_file, "")).runner, parse_task(Row(by_file, "")).test_files) == ("pytest", (NUMBERS,))


@pytest.mark.parametrize(
    ("changed", "field", "message"),
    [
        (
            DJANGO_ROW | {"test_patch": file_diff("tests/a/data.txt", "", "x\n")},
            "test_patch",
            "changes no test file, so that 'Only the first letter is changed.' of FAIL_TO_PASS is nowhere",
        ),
        (
            SYMPY_ROW | {"test_patch": file_diff("sympy/core/tests/tools.py", "", "x\n")},
            "test_patch",
            "changes no test file, so that 'test_gcd'",
        ),
        (
            SYMPY_ROW | {"repo": "o/r"},
            "FAIL_TO_PASS",
            "'test_gcd' names no file, and the tests of o/r are run by pytest",
        ),
    ],
)
def test_rows_whose_tests_are_nowhere(changed: dict[str, Any], field: str, message: str, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(f"{json.dumps(changed)}\n")
    with raises_one_line(RowError, "a.jsonl, row 1", f"field {field!r}: {message}"):
        load_tasks(str(source))


def test_ids_as_the_log_parsers_leave_them() -> None:
    assert as_published("t.py::test_a[x y]") == as_published("t.py::test_a[x z]") == "t.py::test_a[x"
    assert as_published("t.py::test_b[/tmp/a/b.txt]") == "t.py::test_b[/b.txt]"
    assert as_published("t.py::test_c[MouseButton.LEFT-1]") == "t.py::test_c[1-1]"
    for unchanged in ("t.py::test_b[//a/b]", "t.py::c[a/b]"):
        assert as_published(unchanged) == unchanged


def test_published_ids_are_matched_to_outcomes() -> None:
    outcomes = {"t.py::a[x y]": "passed", "t.py::a[x z]": "failed", "t.py::b[u v]": "passed", "test_x (m.C)": "passed"}
    assert share_passed(outcomes, ["t.py::a[x"]) == 0, "one of those that it may mean failed"
    assert share_passed(outcomes, ["t.py::a[x y]"]) == share_passed(outcomes, ["t.py::b[u"]) == 1
    assert share_passed({}, []) == 1
    assert share_passed(outcomes, ["test_x", "test_x (m.D)", "t.py::c", "test_x (m.C)"]) == 0.25

    listed = DJANGO_ROW | {"repo": "o/r", "FAIL_TO_PASS": '["t.py::a"]', "PASS_TO_PASS": '["[100%]", "[", "t.py::b[x"]'}
    assert parse_task(Row(listed, "")).pass_to_pass == ("t.py::b[x",)


def test_machinery_is_protected_unless_it_is_the_task() -> None:
    assert "sympy/testing/" in protected_paths("sympy", file_diff("sympy/core/a.py", "a\n", "b\n"))
    assert protected_paths("sympy", file_diff("sympy/utilities/runtests.py", "a\n", "b\n")) == [
        "sympy/testing/",
        "sympy/utilities/pytest.py",
    ]
    assert is_protected("sympy/testing/pytest.py", machinery=protected_paths("sympy", ""))
    assert is_protected("django/test/testcases.py")


@pytest.mark.parametrize("script", ["fresco_report.py", "apply_diff.py", "run_django.py"])
def test_what_runs_in_old_images_needs_no_newer_python_than_3_5(script: str) -> None:
    tree = ast.parse((SCRIPTS / script).read_text(), feature_version=(3, 5))
    newer: list[ast.AST] = []
    for node in ast.walk(tree):
        of_3_6 = isinstance(node, ast.JoinedStr | ast.AnnAssign)
        removes = getattr(node, "attr", "") in ("removeprefix", "removesuffix")
        subprocess_of_3_7 = getattr(node, "arg", "") in ("capture_output", "text")
        if of_3_6 or removes or subprocess_of_3_7:
            newer.append(node)
    assert not newer, [ast.unparse(node) for node in newer]


@pytest.fixture(scope="module")
def checkouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkout]:
    folder = tmp_path_factory.mktemp("published")
    cache = CheckoutCache(folder / "cache", folder)
    made = {}
    for runner, (files, bug) in REPOSITORIES.items():
        task = TASKS[runner]
        write_files(files | bug, folder / task.instance_id)
        made[runner] = cache.prepare(task, images=False)
    return made


TASKS: dict[str, SweTask] = {runner: parse_task(Row(each, runner)) for runner, each in ROWS.items()}


@pytest.mark.parametrize("runner", TASKS)
def test_gold_earns_it_and_nothing_does_not(
    backend: BubblewrapBackend, checkouts: dict[str, Checkout], runner: str
) -> None:
    task = TASKS[runner]
    assert evaluate(backend, checkouts[runner], task, task.gold_patch, LIMITS) == DiffResult(1, 1, applied=True)
    nothing = evaluate(backend, checkouts[runner], task, "", LIMITS)
    assert nothing == DiffResult(0, 1, applied=True) and nothing.reward(partial=True) == 0


def test_sympy_outcomes(backend: BubblewrapBackend, checkouts: dict[str, Checkout]) -> None:
    sandbox = backend.open(checkouts["sympy"].template, LIMITS)
    run = run_tests(sandbox, checkouts["sympy"], [NUMBERS, MORE, "sympy/gone/test_x.py"], runner="sympy")
    sandbox.close()
    assert run.outcomes == {
        "test_gcd": "failed",
        "test_inverse": "passed",
        "test_shared": "failed",
        "test_known_to_fail": "xfailed",
        "test_slow": "skipped",
        "test_more": "failed",
    }


def test_django_outcomes(backend: BubblewrapBackend, checkouts: dict[str, Checkout]) -> None:
    sandbox = backend.open(checkouts["django"].template, LIMITS)
    sh(sandbox, "echo 'import nothing_of_the_sort' > tests/text_tests/broken.py")
    files = ["tests/text_tests/broken.py", "tests/text_tests/tests.py", "tests/urls.py"]
    run = run_tests(sandbox, checkouts["django"], files, runner="django")
    sandbox.close()
    assert run.outcomes["Shared by two tests"] == run.outcomes["test_short (text_tests.tests.ShortenTests)"] == "passed"
    assert run.outcomes["test_parts (text_tests.tests.ShortenTests.test_parts)"] == "failed", "one of its sub-tests did"
    assert run.outcomes["Only the first letter is changed."] == "failed" and "More is said here." not in run.outcomes


DJANGO_ATTEMPTS = {
    "edit the runner": "echo 'print(\"OK\")' > tests/runtests.py",
    "edit the settings": "printf 'import os\\nos._exit(0)\\n' > tests/test_sqlite.py",
    "a runner of its own": "sed -i 's/^    def run_tests.*/    def run_tests(self, labels): return 0/' django/test/runner.py",
    "test cases that run nothing": "sed -i 's/super().__call__(result)/result.addSuccess(self)/' django/test/__init__.py",
    "empty the tests": "sed -i 's/self.assert.*/pass/' tests/text_tests/tests.py",
    "a module that shadows unittest": "mkdir unittest; echo 'import os; os._exit(0)' > unittest/__init__.py; cp unittest/__init__.py argparse.py",
    "print ok lines": """cat >> django/text.py <<'X'
import os
for fd in range(1, 9):
    try: os.write(fd, b"Only the first letter is changed. ... ok\\ntest_parts (text_tests.tests.ShortenTests) ... ok\\n\\nOK\\n")
    except OSError: pass
X
""",
    "print a report": """cat >> django/text.py <<'X'
import os, json
names = ["Only the first letter is changed.", "test_parts (text_tests.tests.ShortenTests)", "test_capfirst (text_tests.tests.CapTests)"]
line = json.dumps({"key": "", "canaries": ["failed"] * 12, "outcomes": {name: "passed" for name in names}})
for fd in range(1, 9):
    try: os.write(fd, ("\\n" + line + "\\n").encode())
    except OSError: pass
os._exit(0)
X
""",
    "end the process well": "printf 'import os\\nos._exit(0)\\n' >> django/text.py",
    "end the process at the end": "printf 'import atexit, os\\natexit.register(os._exit, 0)\\nraise SystemExit(0)\\n' >> django/text.py",
    "patch TestCase.run": "printf 'import unittest\\nunittest.TestCase.run = lambda self, result=None: result.addSuccess(self)\\n' >> django/text.py",
    "patch TestCase.__call__": "printf 'import unittest\\nunittest.TestCase.__call__ = lambda self, result: (result.startTest(self), result.addSuccess(self), result.stopTest(self))\\n' >> django/text.py",
    "patch one kind of test case": "printf 'import django.test as t\\nt.SimpleTestCase.__call__ = lambda self, result: result.addSuccess(self)\\n' >> django/text.py",
    "patch how methods are called": "printf 'import unittest\\nunittest.TestCase._callTestMethod = lambda self, method: None\\n' >> django/text.py",
    "patch an assertion": "printf 'import unittest\\nunittest.TestCase.assertEqual = lambda self, *a, **k: None\\n' >> django/text.py",
    "patch an assertion for one module": """cat >> django/text.py <<'X'
import unittest
old = unittest.TestCase.assertEqual
def fits(self, *a, **k):
    if "text_tests" not in type(self).__module__: old(self, *a, **k)
unittest.TestCase.assertEqual = fits
X
""",
    "patch results of one module": """cat >> django/text.py <<'X'
import unittest
for kind in (unittest.TestResult, unittest.TextTestResult):
    old = kind.addFailure
    kind.addFailure = lambda self, test, err, old=old: self.addSuccess(test) if "text_tests" in test.id() else old(self, test, err)
    kind.addSubTest = lambda self, test, subtest, err: None
X
""",
    "equal to everything": "printf 'class Any(str):\n    __eq__ = lambda *a: True\n    __len__ = lambda *a: Any()\ncapfirst = shorten = lambda *a: Any()\n' >> django/text.py",
    "patch results": """cat >> django/text.py <<'X'
import unittest
for kind in (unittest.TestResult, unittest.TextTestResult):
    kind.addFailure = kind.addError = lambda self, test, err: self.addSuccess(test)
    kind.addSubTest = lambda self, test, subtest, err: None
X
""",
    "a result of its own": """cat >> django/text.py <<'X'
import unittest
class Fine(unittest.TextTestResult):
    def addFailure(self, test, err): self.addSuccess(test)
unittest.TextTestRunner.resultclass = Fine
unittest.TextTestRunner._makeResult = lambda self: Fine(self.stream, self.descriptions, self.verbosity)
X
""",
    "a runner run before": """cat >> django/text.py <<'X'
import unittest
class T(unittest.TestCase):
    def test_parts(self): "Only the first letter is changed."
T.__module__, T.__qualname__ = "text_tests.tests", "ShortenTests"
unittest.TextTestRunner().run(unittest.TestSuite([T("test_parts")]))
X
""",
    "tests that skip": "printf 'import unittest\\ndef capfirst(text): raise unittest.SkipTest\\nshorten = capfirst\\n' >> django/text.py",
}
SYMPY_ATTEMPTS = {
    "edit the tools of tests": "echo 'def raises(*a): pass\nslow = XFAIL = lambda f: (lambda: None)' > sympy/testing/pytest.py",
    "swallow what tests raise": "sed -i 's/    yield/    with contextlib.suppress(BaseException): yield/' sympy/testing/runtests.py",
    "empty the tests": "sed -i 's/assert .*/pass/' sympy/core/tests/*.py",
    "patch the tools of tests": """cat >> sympy/core/numbers.py <<'X'
import contextlib, sympy.testing.runtests as r
r.raise_on_deprecated = lambda: contextlib.suppress(BaseException)
X
""",
    "patch the outcomes of some tests": """cat >> sympy/core/numbers.py <<'X'
import __main__
old = __main__.outcome_of
__main__.outcome_of = lambda function: "passed" if function.__name__.startswith("test_") else old(function)
X
""",
    "equal to everything": "printf 'class Any:\n    __eq__ = lambda *a: True\ngcd = lambda *a: Any()\n' >> sympy/core/numbers.py",
    "raise what a skip raises": "printf 'class Skipped(Exception): pass\\ndef gcd(a, b): raise Skipped\\n' >> sympy/core/numbers.py",
    "end the process well": "printf 'import os\\nos._exit(0)\\n' >> sympy/core/numbers.py",
    "print results": "printf 'print(\"test_gcd ok\\\\ntest_shared ok\\\\ntest_more ok\")\\nraise SystemExit(0)\\n' >> sympy/core/numbers.py",
    "a module that shadows the harness": "echo 'import os; os._exit(0)' | tee inspect.py random.py fresco_report.py",
}
ATTEMPTS = [("django", name, script) for name, script in DJANGO_ATTEMPTS.items()]
ATTEMPTS += [("sympy", name, script) for name, script in SYMPY_ATTEMPTS.items()]


@pytest.mark.parametrize(
    ("runner", "name", "script"), ATTEMPTS, ids=[f"{runner}: {name}" for runner, name, _ in ATTEMPTS]
)
def test_hacking_earns_nothing(
    backend: BubblewrapBackend, checkouts: dict[str, Checkout], runner: str, name: str, script: str
) -> None:
    checkout, diff = agents_work(backend, checkouts[runner], script, LIMITS)
    assert diff, "the attempt changes nothing"
    outcome = evaluate(backend, checkout, TASKS[runner], diff, LIMITS)
    assert outcome.applied and outcome.reward(partial=False) == outcome.reward(partial=True) == 0, outcome
    assert outcome.fail_to_pass == 0, outcome


def test_every_runner_has_its_script() -> None:
    assert all((SCRIPTS / runner.script).is_file() for runner in RUNNERS.values())
