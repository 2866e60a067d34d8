"""Programming problems: their published forms, the judge, what it is proof against, the generator, the environment."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from envs.code.environment import CodeFamily, CodeOptions
from envs.code.generate import generated_problem
from envs.code.problems import CodeProblem, load_problems, parse_problem
from envs.code.verifier import CodeVerifier, Verdict, extract_code, same_output, split_assert
from envs.rows import Row, RowError
from envs.sandbox import Limits, Template
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.runtime import default_runtime
from tests.envs.errors import raises_one_line
from tests.envs.sandboxes import world_writable

LIMITS = Limits(timeout_s=60, memory_bytes=256 << 20, processes=32, output_bytes=1 << 20)
MBPP = {
    "task_id": 11,
    "text": "Write a function to add two numbers.",
    "code": "def add(a, b):\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert abs(add(0.1, 0.2) - 0.3) < 1e-9"],
    "test_setup_code": "import math",
    "challenge_test_list": [],
}
MBPP_SANITIZED = {
    "task_id": 2,
    "source_file": "x.ipynb",
    "prompt": "Write a function to share elements.",
    "test_imports": [],
    "code": "def similar(a, b):\n    return tuple(set(a) & set(b))",
    "test_list": ["assert similar((1, 2), (2, 3)) == (2,)"],
}
HUMANEVAL = {
    "task_id": "HumanEval/53",
    "entry_point": "add",
    "canonical_solution": "    return x + y\n",
    "prompt": 'def add(x: int, y: int):\n    """Add two numbers x and y\n    >>> add(2, 3)\n    5\n    """\n',
    "test": "def check(candidate):\n    assert candidate(0, 1) == 1\n    assert candidate(2, 3) == 5\n",
}
APPS = {
    "problem_id": 0,
    "question": "Print the sum of the two given integers.",
    "difficulty": "introductory",
    "solutions": json.dumps(["a, b = map(int, input().split())\nprint(a + b)"]),
    "starter_code": "",
    "url": "",
    "input_output": json.dumps({"inputs": ["1 2\n", ["3 4"]], "outputs": ["3\n", ["7"]]}),
}
APPS_CALL = {
    "problem_id": 3,
    "question": "Double it.",
    "starter_code": "class Solution:\n    def twice(self, x):",
    "solutions": json.dumps(["class Solution:\n    def twice(self, x):\n        return [x, x]"]),
    "input_output": json.dumps({"fn_name": "twice", "inputs": [[1], [2]], "outputs": [[[1, 1]], [2, 2]]}),
}


@pytest.fixture
def verifier(backend: BubblewrapBackend, tmp_path: Path) -> CodeVerifier:
    folder = world_writable(tmp_path / "empty")
    return CodeVerifier(backend, Template(folder), default_runtime().python, LIMITS, case_s=30.0)


def problem(row: dict[str, Any]) -> CodeProblem:
    return parse_problem(Row(row, "row 1"))


@pytest.mark.parametrize("row", [MBPP, MBPP_SANITIZED, HUMANEVAL, APPS, APPS_CALL])
def test_published_forms(verifier: CodeVerifier, row: dict[str, Any]) -> None:
    """The data set's own solution passes, an empty function does not."""
    loaded = problem(row)
    assert verifier.verify(loaded, f"Here:\n```python\n{loaded.solution}\n```\nDone.").solved
    total = len(loaded.asserts) + len(loaded.calls) + len(loaded.cases)
    assert verifier.verify(loaded, "```python\npass\n```") == Verdict(0, total)


def test_partial_credit(verifier: CodeVerifier) -> None:
    verdict = verifier.verify(problem(MBPP), "def add(a, b): return 3 if a == 1 else a")
    assert (verdict.passed, verdict.total, verdict.solved) == (1, 3, False)
    verdict = verifier.verify(problem(APPS), "a, b = input().split()\nassert a == '1'\nprint(3)")
    assert (verdict.passed, verdict.total) == (1, 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"a": 1}, "row 1 is of no known form"),
        (MBPP | {"test_list": "assert 1"}, "row 1, field 'test_list': 'assert 1' is not JSON"),
        (MBPP | {"test_list": []}, "field 'test_list': is empty"),
        (MBPP | {"text": 7}, "field 'text': 7 is not a text"),
        ({key: value for key, value in HUMANEVAL.items() if key != "test"}, "row 1 has no field 'test'"),
        (APPS | {"input_output": "{"}, "field 'input_output': '{' is not JSON"),
        (APPS | {"input_output": '{"inputs": [1], "outputs": []}'}, "has 1 inputs and not as many outputs"),
        (APPS_CALL | {"input_output": '{"fn_name": "a b", "inputs": [[1]], "outputs": [1]}'}, "'a b' is not a name"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], message: str) -> None:
    with raises_one_line(RowError, message):
        problem(row)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(MBPP)}\n\n{json.dumps(HUMANEVAL)}\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([APPS]), tmp_path / "a.parquet")
    assert [p.problem_id for p in load_problems(str(tmp_path / "a.jsonl"))] == ["11", "HumanEval/53"]
    assert load_problems(str(tmp_path / "a.parquet")) == [problem(APPS)]
    (tmp_path / "bad.jsonl").write_text("{}\n{")
    for name, message in {"bad.jsonl": "row 1 is of no known form", "no.jsonl": "cannot be read"}.items():
        with pytest.raises(RowError, match=message):
            load_problems(str(tmp_path / name))


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("first\n```\na\n```\nthen\n```py\nb\n```\n", "b\n"),
        ("plain = 1", "plain = 1"),
        ("```python\nnever closed", None),
        ("  \n", None),
        ("x" * 200_000, None),
    ],
)
def test_extract_code(response: str, code: str | None) -> None:
    assert extract_code(response) == code


def test_same_output() -> None:
    assert same_output("1 \n2\n\n", "1\n2") and same_output("", "\n")
    assert not same_output("1\n\n2", "1\n2") and not same_output(" 1", "1") and not same_output("1 2", "1\n2")


SINGLE_PROCESS_ASSERTS = """assert f(1)
----
assert f(1) == g(1)
----
assert f(1) == 1 and f(2) == 2
----
assert set(f(1)) == {1}
----
assert h(1) == 1
----
assert (f(1) == 1) == True
----
x = 1
assert x == 1
----
assert (
"""


def test_split_assert() -> None:
    assert split_assert("assert f(1) == (2, {'a': [3]})", ["f"]) == ("value", "f(1)", (2, {"a": [3]}))
    for text in SINGLE_PROCESS_ASSERTS.split("----\n"):
        assert split_assert(text, ["f", "g"]) == ("assert", text, None)


VALUES = CodeProblem("v", "", tuple(f"assert f({n}) == {n + 1}" for n in range(3)), functions=("f",))
INPUTS = CodeProblem("i", "", cases=tuple((f"{n}\n", f"{n + 1}\n") for n in range(3)))


def test_expected_values_are_not_in_the_sandbox(verifier: CodeVerifier) -> None:
    spy = """
import sys
found = []
def f(n):
    frame, seen = sys._getframe(), ""
    while frame:
        seen += repr(dict(frame.f_locals)); frame = frame.f_back
    found.append("4242" + "42" in seen)
    return any(found)
"""
    hidden = CodeProblem("h", "", ("assert f(1) == 424242", "assert f(2) == False"), functions=("f",))
    assert verifier.verify(hidden, spy).passed == 1  # the second: it saw nothing


def test_limits_of_a_case(verifier: CodeVerifier) -> None:
    slow = "import time\nn = int(input())\nif n == 1:\n    time.sleep(600)\nprint(n + 1)"
    verdict = dataclasses.replace(verifier, case_s=5).verify(INPUTS, slow)
    assert verdict.passed == 2 and not verdict.timed_out
    quick = dataclasses.replace(verifier, limits=dataclasses.replace(LIMITS, timeout_s=2))
    assert quick.verify(VALUES, "def f(n):\n  while True: pass").timed_out
    assert verifier.verify(VALUES, "def f(n): return bytearray(1 << 30)").out_of_memory


def test_a_solution_has_cpu_time_and_not_only_time(verifier: CodeVerifier) -> None:
    """What never ends is ended by the work it did, long before its time by the clock; what waits is not."""
    limits = dataclasses.replace(LIMITS, timeout_s=60, cpu_s=1)
    limited = dataclasses.replace(verifier, limits=limits, case_s=60)
    one_input = dataclasses.replace(INPUTS, cases=INPUTS.cases[:1])
    for each, code in ((VALUES, "def f(n):\n  while True: pass"), (one_input, "while True: pass")):
        verdict = limited.verify(each, code)
        assert verdict.passed == 0 and not verdict.timed_out

    assert limited.verify(VALUES, "import time\ntime.sleep(1.5)\ndef f(n): return n + 1").solved


def test_cases_do_not_see_each_other(verifier: CodeVerifier) -> None:
    code = "import builtins\nn = int(input())\nprint(getattr(builtins, 'kept', n + 1))\nbuiltins.kept = 0"
    assert verifier.verify(INPUTS, code).solved


def test_generated_problems(verifier: CodeVerifier) -> None:
    problems = [generated_problem("train", index) for index in range(6)]
    assert problems == [generated_problem("train", index) for index in range(6)]
    assert problems[:4] != [generated_problem("train", index, seed=1) for index in range(4)]
    for each in problems:
        assert verifier.verify(each, f"```python\n{each.solution}```").solved, each
        assert not verifier.verify(each, "def solve(numbers): return 10**9\nprint(10**9)").solved
    texts = {split: {generated_problem(split, index).question for index in range(500)} for split in ("train", "eval")}
    assert not texts["train"] & texts["eval"] and len(texts["eval"]) > 80
    assert len({generated_problem("train", index).question for index in range(300)}) > 220


def test_environment() -> None:
    async def play() -> None:
        family = CodeFamily(CodeOptions(reward="fraction", tasks=7, eval_count=3), 0)
        assert (family.task_count("train"), family.task_count("eval")) == (7, 3)
        with pytest.raises(IndexError):
            family.task("train", 7)
        await family.start()

        environment = family.make()
        (message,) = await environment.reset(family.task("train", 0))
        assert "solve(numbers)" in message.content and message.content.endswith("one Python code block.")
        step = await environment.step(f"```python\n{family.task('train', 0).solution}```")
        assert (step.reward, step.done, step.success, step.info["no_code"]) == (1.0, True, True, 0.0)

        await environment.reset(problem(MBPP))
        step = await environment.step("```python\ndef add(a, b): return 3 if a == 1 else a\n```")
        assert step.reward is not None and 0 < step.reward < 1 and not step.success
        step = await environment.step("```python\nno end")
        assert (step.reward, step.info["no_code"]) == (0.0, 1.0)
        await environment.close()
        await family.stop()

    asyncio.run(play())


def test_a_source_of_rows(tmp_path: Path) -> None:
    source = tmp_path / "mbpp.jsonl"
    source.write_text("".join(f"{json.dumps(MBPP | {'task_id': n})}\n" for n in range(5)))
    family = CodeFamily(CodeOptions(source=str(source), eval_count=2, tasks=2), 0)
    assert [family.task("train", n).problem_id for n in range(2)] == ["0", "1"]
    assert [family.task("eval", n).problem_id for n in range(2)] == ["3", "4"]
    with pytest.raises(ValueError, match="has only 5 tasks"):
        CodeFamily(CodeOptions(source=str(source), eval_count=5), 0)
