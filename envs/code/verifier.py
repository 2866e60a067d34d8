"""Verifies a response by running its code against a problem's tests in a fresh sandbox."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from envs.code.problems import CodeProblem
from envs.sandbox import Backend, Command, Limits, Result, Template
from envs.sandbox.runtime import HARNESS

_FENCE = r"^[ \t]*```[ \t]*(?:python|py|python3)?[ \t]*\r?\n(.*?)^[ \t]*```"
_BLOCK = re.compile(_FENCE, re.DOTALL | re.MULTILINE | re.IGNORECASE)
MAX_CODE_CHARS = 100_000
_CONTAINERS: dict[str, Callable[[list[object]], object]] = {
    kind.__name__: kind for kind in (list, tuple, set, frozenset)
}
Test = tuple[str, str, object]
"""(value, an expression, what it must be) or (assert, a statement, None)"""


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
    """The last closed fenced block, else the whole response; None when there is nothing, or too much, to run."""
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
        total = len(problem.asserts) or len(problem.cases)
        code = extract_code(response)
        if code is None:
            return Verdict(0, total, no_code=True)

        key = secrets.token_hex(16)
        job = json.dumps(job_of(problem, code, key, self.case_s))
        argv = [self.python, "-I", "-S", f"{HARNESS}/run_code.py"]
        sandbox = self.backend.open(self.template, self.limits)
        try:
            result = sandbox.run(Command(argv, job.encode(), separate_stderr=True))
        finally:
            sandbox.close()

        results = _results(result, key, total)
        if problem.asserts:
            tests = map(split_assert, problem.asserts)
            passed = sum(_holds(got, test) for got, test in zip(results, tests, strict=True))
        else:
            pairs = zip(results, problem.cases, strict=True)
            passed = sum(isinstance(got, str) and same_output(got, expected) for got, (_, expected) in pairs)
        return Verdict(passed, total, result.timed_out, result.out_of_memory)


def job_of(problem: CodeProblem, code: str, key: str, case_s: float) -> dict[str, object]:
    """What `envs/code/harness/run_code.py` reads on its standard input."""
    job: dict[str, object] = {"code": f"{problem.prelude}\n{code}", "key": key, "case_s": case_s}
    if problem.asserts:
        return job | {"tests": [[kind, text] for kind, text, _ in map(split_assert, problem.asserts)]}
    return job | {"inputs": [given for given, _ in problem.cases]}


def split_assert(text: str) -> Test:
    """`assert CALL == LITERAL` as its two sides, so that the solution's process never holds the expected value."""
    try:
        (statement,) = ast.parse(text.strip()).body
        if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Compare):
            compared = statement.test
            if len(compared.ops) == 1 and isinstance(compared.ops[0], ast.Eq):
                return "value", ast.unparse(compared.left), ast.literal_eval(compared.comparators[0])
    except (SyntaxError, ValueError, TypeError):
        pass
    return "assert", text, None


def _holds(got: object, test: Test) -> bool:
    kind, _, expected = test
    if kind == "assert":
        return got is True
    try:
        return bool(_decoded(got) == expected)
    except (ValueError, TypeError, RecursionError):
        return False


def _decoded(value: object) -> object:
    """The plain Python value that the harness wrote: scalars as they are, containers as [kind, items]."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not isinstance(value, list) or len(value) != 2 or not isinstance(value[1], list):
        raise ValueError("no value")
    kind = value[0]
    items = [_decoded(item) for item in value[1]]
    if kind == "dict":
        return dict(zip(items[::2], items[1::2], strict=True))
    if not isinstance(kind, str) or kind not in _CONTAINERS:
        raise ValueError("no value")
    return _CONTAINERS[kind](items)


def same_output(got: str, expected: str) -> bool:
    """Equal up to blanks at the ends of lines and blank lines at the end."""
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
