"""Runs tests in a fresh sandbox (`python -s run_tests.py`): a JSON job on stdin, pytest's output and a JSON line.

Job: {"key", "files": [...], "python_path": [...]}. The line, last and with the key, has each test's outcome. The runner
imports pytest before anything of the repository, from a read-only folder (in a task's own image, from its environment).
Beside the repository's tests run canaries of our own that must fail. Code that makes every test pass, or every use of
an assertion of pytest, unittest or unittest.mock, makes a canary pass, and gives itself away.
"""

import os
import sys
import tempfile

from fresco_report import ASSERTIONS, Report

_CANARIES = """
import sys
import unittest

import pytest

# Loading it takes longer than all canaries; tests that use it have done so.
mock = sys.modules.get("unittest.mock")


def NAME():
    assert [1, 2] == [1, 3]


def NAME_raises():
    raise KeyError(1)


def NAME_tools():
    mocked = [(called,), (called_with,)] if mock else []
    if all_raise([(raises,), (matches,), (approx,), (warns,), (pytest.fail, "x"), *mocked], *FAILED):
        raise AssertionError


class NAME_Plain(Canaries, unittest.TestCase):
    pass


FAILED = (AssertionError, pytest.fail.Exception)


def raises():
    with pytest.raises(ValueError):
        pass


def matches():
    with pytest.raises(ValueError, match="a"):
        raise ValueError("b")


def approx():
    assert 1 == pytest.approx(2)


def warns():
    with pytest.warns(UserWarning):
        pass


def called():
    mock.Mock().assert_called_with(1)


def called_with():
    called = mock.Mock()
    called(1)
    called.assert_called_once_with(2)
"""
HARNESS = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    report = Report()
    sys.path.insert(0, os.path.join(HARNESS, "site"))
    import pytest

    outcomes = {}  # type: dict[str, str]
    name = "test_" + os.urandom(8).hex()

    class Reporter:
        def pytest_configure(self, config: "pytest.Config") -> None:
            """A repository may have other names for its tests, which ours must not miss."""
            config.getini("python_functions").append(name)

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
            before = outcomes.get(report.nodeid)
            if report.outcome == "failed" or before == "failed":
                outcomes[report.nodeid] = "failed"
            elif report.when == "call":
                outcomes[report.nodeid] = "xfailed" if hasattr(report, "wasxfail") else report.outcome
            elif report.outcome == "skipped":
                outcomes[report.nodeid] = "skipped"

    folder = tempfile.mkdtemp()
    canary = os.path.join(folder, name + ".py")
    with open(canary, "w") as file:
        file.write(ASSERTIONS + _CANARIES.replace("NAME", name))
    sys.path[:0] = [os.path.abspath(path) for path in report.job["python_path"]]

    options = "-p no:cacheprovider -o addopts= --tb=short -q --color=no -rN --continue-on-collection-errors"
    arguments = [*report.job["files"], canary, "--rootdir", os.getcwd(), *options.split(), "--disable-warnings"]
    pytest.main(arguments, plugins=[Reporter()])

    canaries = [outcome for test, outcome in outcomes.items() if name in test]
    tests = {test: outcome for test, outcome in outcomes.items() if name not in test}
    report.send(canaries, tests)


if __name__ == "__main__":
    main()
