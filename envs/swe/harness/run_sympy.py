"""Runs test files of SymPy in a fresh sandbox (`python -s run_sympy.py`), as its `bin/test -C` does: plain functions.

Job and report as in run_tests.py; outcomes by the functions' names, since that is all that published rows have. A name
that several files define passed only if it passed in each. SymPy's images have no pytest, and nothing else is needed.
Its own runner (`SymPyTests.test_file` in https://github.com/sympy/sympy/blob/master/sympy/testing/runtests.py) calls
each function under a context that turns deprecations into errors, and takes Skipped, XFail and XPass for outcomes.
"""

import ast
import contextlib
import importlib
import inspect
import os
import random
import sys
import traceback
import warnings
from typing import Any

from fresco_report import Report, worst

_RAISED = {"Skipped": "skipped", "XFail": "xfailed"}


def main() -> None:
    report = Report()
    sys.path[:1] = [os.path.abspath(path) for path in report.job["python_path"]]
    outcomes = {}  # type: dict[str, str]
    for path in report.job["files"]:
        if os.path.exists(path):
            for name, outcome in file_outcomes(path).items():
                outcomes[name] = worst(outcome, outcomes.get(name, outcome))
    report.send([outcome_of(canary) for canary in (fails, errs, raises_nothing)], outcomes)


def file_outcomes(path: str) -> "dict[str, str]":
    """The outcomes by name; what the file defines and what was not run counts as failed."""
    with open(path, "rb") as file:
        defined = [node.name for node in ast.parse(file.read()).body if isinstance(node, ast.FunctionDef)]
    outcomes = {name: "failed" for name in defined if name.startswith("test_")}
    try:
        module = importlib.import_module(path[: -len(".py")].replace("/", "."))
    except BaseException:
        traceback.print_exc()
        return outcomes

    for name in outcomes:
        print(path, name, flush=True)
        skipped = getattr(module, "disabled", False) or getattr(getattr(module, name, None), "_slow", False)
        outcomes[name] = "skipped" if skipped else outcome_of(getattr(module, name, None))
    return outcomes


def outcome_of(function: "Any") -> str:
    """The outcome of calling a test function, or each test that a generator function yields."""
    random.seed(0)
    try:
        with strict():
            if inspect.isgeneratorfunction(function):
                for called, *arguments in function():
                    called(*arguments)
            else:
                function()

    except BaseException as error:
        outcome = _RAISED.get(type(error).__name__, "failed")
        if outcome == "failed":
            traceback.print_exc()
        return outcome
    return "passed"


def strict() -> "Any":
    """SymPy's own context for a test; versions without one let deprecations pass."""
    for name in ("sympy.testing.runtests", "sympy.utilities.runtests"):
        with contextlib.suppress(ImportError, AttributeError):
            return importlib.import_module(name).raise_on_deprecated()
    return warnings.catch_warnings()


def fails() -> None:
    assert [1, 2] == [1, 3]


def errs() -> None:
    raise KeyError(1)


def raises_nothing() -> None:
    """SymPy's `raises`, with which tests expect errors, must tell that there is none."""
    try:
        from sympy.testing.pytest import raises
    except ImportError:
        from sympy.utilities.pytest import raises
    raises(ZeroDivisionError, lambda: 1)


if __name__ == "__main__":
    main()
