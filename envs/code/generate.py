"""Seeded programming problems for offline use: small programs over a list of integers, composed of known steps.

A problem is a pipeline keep → change → combine with random constants; its text, a reference solution and its tests
follow from it. Half are functions scored by asserts, half are programs scored by their output. Which pipelines are held
out depends on the pipeline alone, so that training and evaluation never share one.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from envs.code.problems import CodeProblem

EVAL_SHARE = 0.2
_TESTS = 8

_KEEP = (
    ("", "True"),
    ("that are divisible by {k}", "x % {k} == 0"),
    ("that are not divisible by {k}", "x % {k} != 0"),
    ("that are greater than {n}", "x > {n}"),
    ("that are less than {n}", "x < {n}"),
    ("whose absolute value is at least {n}", "abs(x) >= {n}"),
)
_CHANGE = (
    ("", "x"),
    ("multiplied by {k}", "x * {k}"),
    ("squared", "x * x"),
    ("plus {n}", "x + {n}"),
    ("reduced modulo {k}", "x % {k}"),
    ("subtracted from {n}", "{n} - x"),
)
_COMBINE = (
    ("the sum of", "sum(values)"),
    ("the number of different", "len(set(values))"),
    ("the largest, or 0 if there are none, of", "max(values, default=0)"),
    ("the smallest, or 0 if there are none, of", "min(values, default=0)"),
    ("the alternating sum (first minus second plus third and so on) of", "sum(values[::2]) - sum(values[1::2])"),
    ("the sum of the products of neighbours among", "sum(a * b for a, b in zip(values, values[1:]))"),
)


@dataclass(frozen=True)
class Pipeline:
    """Which steps a program takes, by their places in the tables above, and their constants."""

    keep: int
    change: int
    combine: int
    k: int
    n: int
    program: bool
    """Reads and prints, instead of a function."""

    @property
    def held_out(self) -> bool:
        return zlib.crc32(repr(self).encode()) < EVAL_SHARE * 2**32


def generated_problem(split: str, index: int, seed: int = 0) -> CodeProblem:
    """Problem `index` (from 0) of `train` or `eval`: the same in every process."""
    if split not in ("train", "eval"):
        raise ValueError(f"split={split!r}: must be train or eval")
    rng = random.Random(f"{seed} {split} {index}")
    while True:
        pipeline = Pipeline(
            keep=rng.randrange(len(_KEEP)),
            change=rng.randrange(len(_CHANGE)),
            combine=rng.randrange(len(_COMBINE)),
            k=rng.randint(2, 9),
            n=rng.randint(1, 20),
            program=index % 2 == 1,
        )

        pipeline = _without_idle_constants(pipeline)
        if pipeline.held_out == (split == "eval"):
            return _problem(pipeline, rng, f"{split}-{seed}-{index}")


def _without_idle_constants(pipeline: Pipeline) -> Pipeline:
    """Constants that no step uses are 0, so that equal programs are equal pipelines."""
    used = _KEEP[pipeline.keep][1] + _CHANGE[pipeline.change][1]
    return replace(pipeline, k=pipeline.k if "{k}" in used else 0, n=pipeline.n if "{n}" in used else 0)


def _problem(pipeline: Pipeline, rng: random.Random, problem_id: str) -> CodeProblem:
    constants = {"k": pipeline.k, "n": pipeline.n}
    kept, keep = _KEEP[pipeline.keep]
    changed, change = _CHANGE[pipeline.change]
    what, combine = _COMBINE[pipeline.combine]

    task = f"{what} the given integers {kept}".strip().format(**constants)
    if changed:
        task += f", each {changed.format(**constants)}"
    expression = f"values = [{change} for x in numbers if {keep}]".format(**constants)
    function = f"def solve(numbers):\n    {expression}\n    return {combine}\n"

    solve = _reference(function)
    inputs = [[], *([rng.randint(-30, 30) for _ in range(rng.randint(1, 9))] for _ in range(_TESTS - 1))]
    examples = [(numbers, solve(numbers)) for numbers in inputs]

    if not pipeline.program:
        question = f"Write a Python function `solve(numbers)` that returns {task}."
        asserts = tuple(f"assert solve({numbers!r}) == {result}" for numbers, result in examples)
        return CodeProblem(problem_id, question, asserts, functions=("solve",), solution=function)

    question = (
        f"Write a Python program that reads integers, separated by blanks, from one line of standard input "
        f"(the line may be empty) and prints {task}."
    )
    cases = tuple((" ".join(map(str, numbers)) + "\n", f"{result}\n") for numbers, result in examples)
    solution = f"{function}\nprint(solve([int(word) for word in input().split()]))\n"
    return CodeProblem(problem_id, question, cases=cases, solution=solution)


def _reference(function: str) -> Callable[[list[int]], int]:
    namespace: dict[str, Callable[[list[int]], int]] = {}
    # This is our own text, from the tables above.
    exec(function, namespace)
    return namespace["solve"]
