"""Programming problems and the published forms they come in: MBPP, HumanEval, APPS."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import Any

from envs.rows import Row, RowError, read_rows

MAX_CASES = 64
"""The most cases of one problem. APPS has problems with hundreds of cases, of which these many are taken evenly."""


@dataclass(frozen=True)
class CodeProblem:
    """A problem, scored by `asserts` (statements), by `calls` (an expression, the values that are right) or by `cases`
    (input, expected output)."""

    problem_id: str
    question: str
    asserts: tuple[str, ...] = ()
    calls: tuple[tuple[str, tuple[object, ...]], ...] = ()
    cases: tuple[tuple[str, str], ...] = ()
    functions: tuple[str, ...] = ()
    """What asserts take from the solution, whatever Python or the prelude calls by that name. They take from it too
    what neither knows."""
    prelude: str = ""
    """Put before the solution, and before the asserts: imports, the head of a function to complete."""
    solution: str = ""
    """A reference, where the data set has one."""


def load_problems(source: str, subset: str | None = None, split: str = "train") -> list[CodeProblem]:
    """All problems of a file or hub name, each row in the form its fields say. Raises RowError."""
    problems = [parse_problem(row) for row in read_rows(source, subset, split)]
    if not problems:
        raise RowError(f"{source} has no rows")
    return problems


def parse_problem(row: Row) -> CodeProblem:
    """One row of any of the three forms. Raises RowError."""
    if row.has("entry_point"):
        return _humaneval(row)
    if row.has("test_list"):
        return _mbpp(row)
    if row.has("input_output"):
        return _apps(row)
    raise RowError(
        f"{row.where} is of no known form: HumanEval has 'entry_point', MBPP 'test_list', APPS 'input_output'; "
        f"it has {', '.join(map(repr, row.values))}"
    )


def _humaneval(row: Row) -> CodeProblem:
    prompt = row.text("prompt")
    entry_point = row.text("entry_point")
    return CodeProblem(
        str(row.values.get("task_id", row.where)),
        f"Complete this Python function. Answer with the whole function.\n\n{prompt}",
        asserts=(f"{row.text('test')}\n\ncheck({entry_point})\n",),
        functions=(entry_point,),
        prelude=prompt,
        solution=prompt + row.text("canonical_solution", default=""),
    )


def _mbpp(row: Row) -> CodeProblem:
    """The sanitized subset says `prompt` and `test_imports`, the full one `text` and `test_setup_code`."""
    tests = row.strings("test_list")
    if not tests:
        row.fail("test_list", "is empty")

    solution = row.text("code", default="")
    return CodeProblem(
        str(row.values.get("task_id", row.where)),
        f"{row.text('text', 'prompt')}\nYour code should pass this test:\n{tests[0]}",
        asserts=tuple(tests),
        functions=defined_in(solution),
        prelude=row.text("test_setup_code", default="") or "\n".join(row.strings("test_imports", default=[])),
        solution=solution,
    )


def defined_in(code: str) -> tuple[str, ...]:
    """The functions and classes that a program defines; none if it is no Python 3."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError):
        return ()
    return tuple(node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef))


def _apps(row: Row) -> CodeProblem:
    tests = row.json("input_output")
    if not isinstance(tests, dict) or not isinstance(tests.get("inputs"), list):
        row.fail("input_output", "has no list 'inputs'")

    inputs = tests["inputs"]
    outputs = tests.get("outputs")
    if not isinstance(outputs, list) or len(outputs) != len(inputs) or not inputs:
        row.fail("input_output", f"has {len(inputs)} inputs and not as many outputs")

    every = max(1, -(-len(inputs) // MAX_CASES))
    pairs = list(zip(inputs, outputs, strict=True))[::every]
    question = row.text("question")
    starter = row.text("starter_code", default="")
    if starter:
        question += f"\nBegin with this code:\n{starter}"
    problem = CodeProblem(
        str(row.values.get("problem_id", row.where)),
        question,
        solution=next(iter(row.strings("solutions", default=[])), "") if row.values.get("solutions") else "",
    )

    name = tests.get("fn_name")
    if name is None:
        return replace(problem, cases=tuple((_joined(given), _joined(expected)) for given, expected in pairs))
    if not isinstance(name, str) or not name.isidentifier():
        row.fail("input_output", f"fn_name={name!r} is not a name")
    return replace(problem, calls=tuple(_call(row, name, *pair) for pair in pairs))


def _call(row: Row, name: str, arguments: Any, expected: Any) -> tuple[str, tuple[object, ...]]:
    """`Solution().f` where the solution is a class; some rows have the value alone, some in a list."""
    if not isinstance(arguments, list):
        row.fail("input_output", f"inputs of {name} must be lists of arguments, not {type(arguments).__name__}")
    target = f"(Solution().{name} if 'Solution' in globals() else {name})"
    only = expected[0] if isinstance(expected, list) and len(expected) == 1 else expected
    return f"{target}(*{arguments!r})", (only, expected)


def _joined(value: Any) -> str:
    """APPS writes an input as one text or as a list of lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
