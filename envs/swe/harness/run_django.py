"""Runs Django's own tests in a fresh sandbox (`python -s run_django.py`), by its tests/runtests.py, in this process.

Job and report as in run_tests.py. The labels are those of SWE-bench: each file of the job as a module below tests/.
Django runs its suite with `unittest.TextTestRunner`; ours stands in its place before Django is imported, and its result
notes the outcomes. What is printed counts for nothing. Each test is reported by the names that a published row may
have for it (`unittest.TextTestResult.getDescription`): `test_a (module.Class)`, `test_a (module.Class.test_a)` since
Python 3.11, or the first line of its docstring. A name of several tests passed only if each of them passed.

The canaries go the same way as the tests, one of each kind of test class. So code that makes a kind of test pass, or an
assertion, makes a canary pass.
"""

import os
import runpy
import sys
import tempfile
import traceback
import unittest
import unittest.mock
from typing import Any

from fresco_report import ASSERTIONS, Report, worst

_CANARIES = (
    """import unittest
from django.test import SimpleTestCase, TestCase, TransactionTestCase
"""
    + ASSERTIONS
    + """

class Plain(Canaries, unittest.TestCase):
    pass


class Simple(Canaries, SimpleTestCase):
    pass


class Database(Canaries, TestCase):
    pass


class Transaction(Canaries, TransactionTestCase):
    available_apps = []
"""
)


class Record:
    """The outcomes of the outermost run; tests of Django's runner run others within it."""

    def __init__(self) -> None:
        self.begun = False
        self.ended = False
        # The outcome of each test by its key; None: it was not run.
        self._tests = {}  # type: dict[tuple[str, str, str, str], str | None]

    def plan(self, suite: "unittest.TestSuite") -> None:
        for test in suite:
            if isinstance(test, unittest.TestSuite):
                self.plan(test)
            else:
                self._tests[key_of(test)] = None

    def note(self, test: "unittest.TestCase", outcome: str) -> None:
        # A sub-test counts as its test.
        key = key_of(getattr(test, "test_case", test))
        self._tests[key] = worst(outcome, self._tests.get(key) or outcome)

    def outcomes(self, name: str) -> "tuple[list[str], dict[str, str]]":
        """The outcomes of the tests of module `name`, and those of all others by their names."""
        canaries = []
        others = {}  # type: dict[str, str]
        for (module, owner, method, description), outcome in self._tests.items():
            # A test that was not run has failed.
            outcome = outcome or "failed"
            if module == name:
                canaries.append(outcome)
                continue

            where = module + "." + owner
            plain, newer = (method + " (" + place + ")" for place in (where, where + "." + method))
            for known in {plain, newer, description} - {""}:
                others[known] = worst(outcome, others.get(known, outcome))
        return canaries, others


RECORD = Record()


class Result(unittest.TextTestResult):
    """Notes every outcome in `RECORD`."""

    def addSuccess(self, test: "unittest.TestCase") -> None:
        RECORD.note(test, "passed")
        super().addSuccess(test)

    def addFailure(self, test: "unittest.TestCase", err: "Any") -> None:
        RECORD.note(test, "failed")
        super().addFailure(test, err)

    def addError(self, test: "unittest.TestCase", err: "Any") -> None:
        RECORD.note(test, "failed")
        super().addError(test, err)

    def addSubTest(self, test: "unittest.TestCase", subtest: "unittest.TestCase", err: "Any") -> None:
        if err is not None:
            RECORD.note(test, "failed")
        super().addSubTest(test, subtest, err)

    def addSkip(self, test: "unittest.TestCase", reason: str) -> None:
        RECORD.note(test, "skipped")
        super().addSkip(test, reason)

    def addExpectedFailure(self, test: "unittest.TestCase", err: "Any") -> None:
        RECORD.note(test, "xfailed")
        super().addExpectedFailure(test, err)

    def addUnexpectedSuccess(self, test: "unittest.TestCase") -> None:
        RECORD.note(test, "failed")
        super().addUnexpectedSuccess(test)


class Runner(unittest.TextTestRunner):
    """Records the outermost run; the others are as unittest makes them."""

    def run(self, test: "Any") -> "unittest.TextTestResult":
        if RECORD.begun:
            return super().run(test)
        RECORD.begun = True
        RECORD.plan(test)
        self.resultclass = Result  # type: ignore[assignment]
        result = super().run(test)
        RECORD.ended = True
        return result


def key_of(test: "unittest.TestCase") -> "tuple[str, str, str, str]":
    """Module, class, method and the first line of the docstring, which is what `shortDescription` gives."""
    kind = type(test)
    method = getattr(test, "_testMethodName", "")
    lines = (getattr(test, "_testMethodDoc", None) or "").strip().split("\n")
    return kind.__module__, kind.__qualname__, method, lines[0].strip()


def labels(files: "list[str]") -> "list[str]":
    """The labels of the files that are still there; those at the top of tests/ have no tests."""
    there = [path for path in files if path.startswith("tests/") and path.count("/") > 1 and os.path.exists(path)]
    return [path[len("tests/") : -len(".py")].replace("/", ".") for path in there]


def main() -> None:
    report = Report()
    unittest.TextTestRunner = unittest.runner.TextTestRunner = Runner  # type: ignore[misc]
    folder = tempfile.mkdtemp()
    name = "canary_" + os.urandom(8).hex()
    with open(os.path.join(folder, name + ".py"), "w") as file:
        file.write(_CANARIES)

    sys.path[:1] = [os.path.abspath(path) for path in ["tests", *report.job["python_path"], folder]]
    runtests = os.path.abspath("tests/runtests.py")
    with open(runtests) as file:
        parallel = ["--parallel=1"] if "--parallel" in file.read() else []
    sys.argv = [runtests, "--settings=test_sqlite", *parallel, *labels(report.job["files"]), name]

    try:
        runpy.run_path(runtests, run_name="__main__")
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()

    if RECORD.ended:
        report.send(*RECORD.outcomes(name))


if __name__ == "__main__":
    main()
