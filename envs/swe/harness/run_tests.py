"""Runs tests in a fresh sandbox (`python -s run_tests.py`): a JSON job on stdin, pytest's output and a JSON line.

Job: {"key", "files": [...], "python_path": [...]}. The line, last and with the key, has each test's outcome. pytest is
imported before anything of the repository, from a read-only folder (in a task's own image, from its environment).
Beside the repository's tests runs a canary of our own that must fail: code that makes every test pass makes the canary
pass, and gives itself away.
"""

import os
import sys
import tempfile

from fresco_report import Report

HARNESS = os.path.dirname(os.path.abspath(__file__))


def main() -> None:
    report = Report()
    sys.path.insert(0, os.path.join(HARNESS, "site"))
    import pytest

    outcomes = {}  # type: dict[str, str]

    class Reporter:
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
    name = "test_" + os.urandom(8).hex()
    canary = os.path.join(folder, name + ".py")
    with open(canary, "w") as file:
        file.write(f"def {name}():\n    assert [1, 2] == [1, 3]\n\n\ndef {name}_raises():\n    raise KeyError(1)\n")
    sys.path[:0] = [os.path.abspath(path) for path in report.job["python_path"]]

    options = "-p no:cacheprovider -o addopts= --tb=short -q --color=no -rN --continue-on-collection-errors"
    arguments = [*report.job["files"], canary, "--rootdir", os.getcwd(), *options.split(), "--disable-warnings"]
    pytest.main(arguments, plugins=[Reporter()])

    canaries = [outcome for test, outcome in outcomes.items() if name in test]
    tests = {test: outcome for test, outcome in outcomes.items() if name not in test}
    report.send(canaries, tests)


if __name__ == "__main__":
    main()
