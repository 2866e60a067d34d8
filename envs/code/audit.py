"""What a rewarded program certainly fails: tests that expect something else, and programs that give something else."""

from __future__ import annotations

import ast
import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from envs.audit.auditor import Change
from envs.code.problems import CodeProblem
from envs.code.verifier import CodeVerifier, extract_code, split_assert, value_given
from envs.swe.mutate import mutations

_MUTANTS = 8
"""Programs that are run until one gives something else."""


def other(value: Any) -> Any:
    """A value that is not equal to this one; None: there is none that could be written."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1 if value + 1 != value else None
        case str():
            return f"{value}x"

        case list():
            return [*value, "x"]
        case tuple():
            return (*value, "x")
        case dict():
            return {**value, "x": "x"} if "x" not in value else None
    return None


def block(code: str) -> str:
    return f"```python\n{code}\n```"


def other_tests(problem: CodeProblem) -> Iterator[CodeProblem]:
    """The problem with another expected value, in one of its tests."""
    if problem.cases:
        given, expected = problem.cases[-1]
        yield replace(problem, cases=(*problem.cases[:-1], (given, f"{expected.rstrip()}x\n")))

    if problem.calls:
        text, (only, _) = problem.calls[-1]
        changed = other(only)
        if changed is not None:
            yield replace(problem, calls=(*problem.calls[:-1], (text, (changed,))))

    for place, text in enumerate(problem.asserts):
        changed_text = _other_literal(text)
        if changed_text:
            yield replace(problem, asserts=(*problem.asserts[:place], changed_text, *problem.asserts[place + 1 :]))
            return


def _other_literal(text: str) -> str:
    """The statements with another literal in an equality that is sure to be reached; empty: there is none."""
    try:
        tree = ast.parse(text.strip())
    except (SyntaxError, ValueError):
        return ""

    reached = [*tree.body, *(each for node in tree.body if isinstance(node, ast.FunctionDef) for each in node.body)]

    for statement in reached:
        match statement:
            case ast.Assert(ast.Compare(_, [ast.Eq()], [literal])) as test:
                with contextlib.suppress(ValueError, TypeError):
                    changed = other(ast.literal_eval(literal))
                    if changed is not None:
                        assert isinstance(test.test, ast.Compare)
                        test.test.comparators[0] = ast.parse(repr(changed), mode="eval").body
                        return ast.unparse(tree)
    return ""


def without_result(problem: CodeProblem, code: str) -> str:
    """The program with something printed too much, or with a function that gives nothing; empty: that may be right."""
    if problem.cases:
        return f"print('x')\n{code}"
    for text in problem.asserts:
        kind, call, expected = split_assert(text, problem.functions)
        name = call.partition("(")[0]
        if kind == "value" and expected is not None:
            return f"{code}\n\ndef {name}(*_, **__):\n    return None\n"
    return ""


def mutant(verifier: CodeVerifier, problem: CodeProblem, code: str, dice: random.Random) -> str:
    """The program with one operator or literal changed, if the tests are seen to get something else of it.

    Blocks. Both programs are run, and what they give is compared with each other, not with what is expected.
    """
    source = code.encode()
    try:
        found = list(mutations(source))
    except (SyntaxError, ValueError, RecursionError):
        return ""
    before = verifier.outputs(problem, code)
    for mutation in dice.sample(found, min(_MUTANTS, len(found))):
        changed = mutation.apply(source).decode()
        after = verifier.outputs(problem, changed)
        if any(_differ(*pair) for pair in zip(before, after, strict=True)):
            return changed
    return ""


def _differ(before: object, after: object) -> bool:
    """Whether two outputs of a test that expects one value cannot both be right."""
    if isinstance(before, str) and isinstance(after, str):
        return before.split() != after.split()
    if isinstance(before, dict) and isinstance(after, dict):
        with contextlib.suppress(KeyError, ValueError, TypeError, RecursionError):
            return bool(value_given(before) != value_given(after))
    return False


def changes(verifier: CodeVerifier, problem: CodeProblem, response: str, dice: random.Random) -> list[Change]:
    """Blocks for the programs that are tried."""
    code = extract_code(response)
    if code is None:
        return []
    made = [Change("another expected value", False, each, response) for each in other_tests(problem)]
    empty = without_result(problem, code)
    changed = "" if problem.calls else mutant(verifier, problem, code, dice)
    made += [
        Change(what, False, problem, block(text))
        for what, text in (("without its result", empty), ("an operator or a literal", changed))
        if text
    ]
    return [*made, Change("a comment", True, problem, block(f"{code}\n# audited"))]
