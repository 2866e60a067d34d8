"""Verifies a response by running its code against a problem's tests in a fresh sandbox.

What comes out of the sandbox is, for a call and for a program, what it gave: it is compared here, with expected values
that never went in. For any other test it is whether it held, as a process says that runs none of the solution.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

from envs.answers import answer_of
from envs.code.harness.run_code import decoded
from envs.code.problems import CodeProblem
from envs.sandbox import Backend, Command, Limits, Result, Template
from envs.sandbox.runtime import HARNESS

_FENCE = r"^[ \t]*```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)^[ \t]*```"
_BLOCK = re.compile(_FENCE, re.DOTALL | re.MULTILINE | re.IGNORECASE)
MAX_CODE_CHARS = 100_000
Test = tuple[str, str, object]
"""(value, an expression, what it must be), (call, an expression, what it may be) or (assert, a statement, None)"""


@dataclass(frozen=True)
class Verdict:
    """How many of a problem's tests a response passed, and why it may have passed none."""

    passed: int
    total: int
    timed_out: bool = False
    out_of_memory: bool = False
    no_code: bool = False

    @property
    def solved(self) -> bool:
        return self.passed == self.total

    @property
    def fraction(self) -> float:
        return self.passed / self.total


def extract_code(response: str) -> str | None:
    """The last closed fenced block, else the whole response; None when there is nothing, or too much, to run.

    What the model thinks before it answers is no part of it.
    """
    response = answer_of(response)
    blocks = _BLOCK.findall(response)
    code = blocks[-1] if blocks else response
    return code if code.strip() and len(code) <= MAX_CODE_CHARS and "```" not in code else None


@dataclass(frozen=True)
class CodeVerifier:
    """Runs solutions on `template`, an empty folder; `case_s` is the time of one input of a program."""

    backend: Backend
    template: Template
    python: str
    limits: Limits
    case_s: float

    def verify(self, problem: CodeProblem, response: str) -> Verdict:
        """Blocks for one sandbox and one Python. Raises SandboxError for faults of the host only."""
        total = tests_in(problem)
        code = extract_code(response)
        if code is None:
            return Verdict(0, total, no_code=True)

        result, results = self._run(problem, code)
        if problem.cases:
            pairs = zip(results, problem.cases, strict=True)
            passed = sum(isinstance(got, str) and same_output(got, expected) for got, (_, expected) in pairs)
        else:
            passed = sum(_holds(got, test) for got, test in zip(results, tests_of(problem), strict=True))
        return Verdict(passed, total, result.timed_out, result.out_of_memory)

    def outputs(self, problem: CodeProblem, code: str) -> list[object]:
        """What the tests get of a program, compared with nothing; None where it failed. Blocks as `verify` does."""
        return self._run(problem, code)[1]

    def _run(self, problem: CodeProblem, code: str) -> tuple[Result, list[object]]:
        key = secrets.token_hex(16)
        job = json.dumps(job_of(problem, code, key, self.case_s))
        argv = [self.python, "-I", "-S", f"{HARNESS}/run_code.py"]
        sandbox = self.backend.open(self.template, self.limits)
        try:
            result = sandbox.run(Command(argv, job.encode(), separate_stderr=True))
        finally:
            sandbox.close()

        return result, _results(result, key, tests_in(problem))


def tests_in(problem: CodeProblem) -> int:
    return len(problem.asserts) + len(problem.calls) + len(problem.cases)


def job_of(problem: CodeProblem, code: str, key: str, case_s: float) -> dict[str, object]:
    """What `envs/code/harness/run_code.py` reads on its standard input."""
    job: dict[str, object] = {"code": f"{problem.prelude}\n{code}", "key": key}
    if problem.cases:
        return job | {"case_s": case_s, "inputs": [given for given, _ in problem.cases]}
    tests = [[kind, text] for kind, text, _ in tests_of(problem)]
    return job | {"prelude": problem.prelude, "functions": problem.functions, "tests": tests}


def tests_of(problem: CodeProblem) -> list[Test]:
    calls: list[Test] = [("call", text, right) for text, right in problem.calls]
    return [*(split_assert(text, problem.functions) for text in problem.asserts), *calls]


def split_assert(text: str, functions: Collection[str]) -> Test:
    """`assert CALL == LITERAL` as its two sides, where the call is of one of `functions`."""
    try:
        (statement,) = ast.parse(text.strip()).body
    except (SyntaxError, ValueError):
        return "assert", text, None

    match statement:
        case ast.Assert(ast.Compare(ast.Call(ast.Name(name)) as call, [ast.Eq()], [literal])) if name in functions:
            with contextlib.suppress(ValueError, TypeError):
                return "value", ast.unparse(call), ast.literal_eval(literal)
    return "assert", text, None


def _holds(got: object, test: Test) -> bool:
    kind, _, expected = test
    if kind == "assert" or not isinstance(got, dict):
        return got is True and kind == "assert"
    try:
        value = value_given(got)
        if kind == "call" and isinstance(expected, tuple):
            # As APPS compares: a tuple is a list, and keys are texts.
            return json.loads(json.dumps(value)) in expected
        return bool(value == expected)
    except (KeyError, ValueError, TypeError, RecursionError):
        return False


def value_given(got: dict[str, object]) -> Any:
    """The value that a test got. Raises KeyError, ValueError or TypeError where that is no plain one."""
    return decoded(got["value"], _refuse)


def _refuse(_: int) -> NoReturn:
    raise ValueError("no plain value")


def same_output(got: str, expected: str) -> bool:
    """Whether they are equal up to blanks at the ends of lines and blank lines at the end."""
    return _lines(got) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _results(result: Result, key: str, total: int) -> list[object]:
    """What the harness reported, if it did; hostile until it carries the key and has the right form."""
    for line in reversed(result.output.splitlines()):
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(report, dict) and report.get("key") == key:
            results = report.get("results")
            if isinstance(results, list) and len(results) == total:
                return results
    return [None] * total
