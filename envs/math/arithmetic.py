"""Arithmetic word problems of one and two steps: the laptop-size problem of the math environment.

`problem(split, index, seed)` is deterministic and needs no files. The splits are disjoint in the strictest
sense: (kind, numbers) is hashed, and a held-out combination of numbers occurs in training under no wording.

`demonstrate` is what the tiny model's warm start imitates. It is a student who mostly answers after the first step,
sometimes writes the working down, and sometimes picks the wrong operation on the way. A model that imitates it is right
about one time in three, although it has seen everything needed to be right nearly always. What to do more of, and what
to stop doing, is left to reinforcement learning.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product

from envs.math.problems import Problem

EVAL_SHARE = 0.25
"""Share of all (kind, numbers) combinations that is held out."""
LARGEST = 99
"""Largest number in a problem or in its working."""

Step = tuple[str, int, int]  # operation + - *, index of the left and the right value

NAMES = ("Mia", "Tom", "Ana", "Ben", "Eva", "Sam", "Lea", "Max", "Zoe", "Leo", "Ida", "Jon")
THINGS = ("apples", "books", "cards", "coins", "pens", "shells", "stamps", "cookies", "eggs", "toys", "balls", "cups")
PLACES = ("boxes", "bags", "rows", "packs")


@dataclass(frozen=True)
class Kind:
    """A family of problems: the numbers it draws, its working, its wordings.

    Values are numbered: the given numbers first, then the result of each step.
    """

    name: str
    ranges: tuple[range, ...]
    steps: tuple[Step, ...]
    wordings: tuple[str, ...]


@dataclass(frozen=True)
class ArithmeticProblem(Problem):
    """A problem with the working that solves it: equations as (left, operation, right)."""

    working: tuple[tuple[int, str, int], ...] = ()
    numbers: tuple[int, ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class Student:
    """Habits of the demonstrator, as probabilities; what is left over is careful and right."""

    hasty: float = 0.65
    """Answers with the result of the first step (right for one-step problems only), without working."""
    slip: float = 0.13
    """Writes the working down, but takes a wrong operation in one step."""


# Few enough equations that a minute of demonstrations covers them; it is their combinations that are held out.
_RANGES = {"small": range(2, 10), "number": range(2, 17), "large": range(10, 28), "times": range(2, 7)}
_TABLE = """
add: number + number
{A} has {a} {t}. {B} has {b} {t}. How many {t} do they have together?
{A} finds {a} {t} and then {b} more. How many {t} does {A} have?

subtract: large - small
{A} has {a} {t} and gives {b} to {B}. How many {t} are left?
There are {a} {t}. {A} takes {b} of them. How many {t} are left?

multiply: small * times
{A} has {a} {p} with {b} {t} in each. How many {t} are there?
There are {a} {p} of {b} {t}. How many {t} are there?

add, subtract: number + number - small
{A} has {a} {t} and buys {b} more. {A} gives {c} to {B}. How many {t} are left?
{A} has {a} {t}. {B} has {b} {t}. They lose {c}. How many {t} are left?

subtract, add: large - small + small
{A} has {a} {t} and loses {b}. Then {A} buys {c}. How many {t} does {A} have?
There are {a} {t}. {A} takes {b} and {B} brings {c}. How many {t} are there?

subtract, subtract: large - small - small
{A} has {a} {t}. {A} gives {b} to {B} and loses {c}. How many {t} are left?
There are {a} {t}. {A} takes {b} and {B} takes {c}. How many {t} are left?

add, add: number + number + small
{A} has {a} {t}. {B} has {b} and {C} has {c}. How many {t} do they have together?
{A} finds {a} {t}, then {b} more and then {c} more. How many {t} does {A} have?

multiply, add: small * times + small
{A} has {a} {p} with {b} {t} in each and buys {c} more. How many {t} does {A} have?
There are {a} {p} of {b} {t}. {B} brings {c} {t}. How many {t} are there?

multiply, subtract: small * times - small
{A} has {a} {p} with {b} {t} in each and gives {c} to {B}. How many {t} are left?
There are {a} {p} of {b} {t}. {A} takes {c}. How many {t} are left?

more, add: number + small + small
{A} has {a} {t}. {B} has {b} more than {A} and buys {c}. How many {t} does {B} have?
{A} finds {a} {t}. {B} finds {b} more than {A} and then {c} more. How many {t} does {B} find?

fewer, subtract: large - small - small
{A} has {a} {t}. {B} has {b} fewer than {A} and loses {c}. How many {t} does {B} have?
{A} finds {a} {t}. {B} finds {b} fewer than {A} and gives {c} to {C}. How many {t} does {B} have?
"""


def _read_kinds(table: str) -> Iterator[Kind]:
    """Kinds as the table has them: the name and what is worked out from left to right, then the wordings."""
    for block in table.strip().split("\n\n"):
        head, *wordings = block.splitlines()
        name, _, chain = head.partition(": ")
        drawn = [_RANGES[word] for word in chain.split()[::2]]
        # The first step takes the first two numbers, each later one the result before it and the next number.
        lefts = [0, *range(len(drawn), 2 * len(drawn))]
        steps = zip(chain.split()[1::2], lefts, range(1, len(drawn)), strict=False)
        yield Kind(name, tuple(drawn), tuple(steps), tuple(wordings))


KINDS = tuple(_read_kinds(_TABLE))


def problem(split: str, index: int, seed: int = 0) -> ArithmeticProblem:
    """Problem `index` (any, from 0) of `train` or `eval`.

    Kinds take turns; within a kind the numbers are walked in an order shuffled by the seed.
    """
    turn, kind_index = divmod(index, len(KINDS))
    kind = KINDS[kind_index]
    combinations = _order(split, kind_index, seed)
    numbers = combinations[turn % len(combinations)]

    rng = random.Random((seed * 2 + (split == "eval")) << 40 | index)
    a, b, c = rng.sample(NAMES, 3)
    values = dict(zip("abc", numbers, strict=False))
    question = rng.choice(kind.wordings).format(A=a, B=b, C=c, t=rng.choice(THINGS), p=rng.choice(PLACES), **values)

    working = _work(kind.steps, numbers)
    answer = evaluate(*working[-1])
    return ArithmeticProblem(question, str(answer), working, numbers, kind.name)


def size(split: str) -> int:
    """Problems of a split: as many as there are combinations of numbers in it."""
    return sum(len(combinations(split, kind)) for kind in range(len(KINDS)))


def solution(problem: ArithmeticProblem) -> str:
    """The careful answer: the working, then the boxed result (`12+7=19; 19-4=15; \\boxed{15}`)."""
    return _written(problem.working)


def demonstrate(problem: ArithmeticProblem, rng: random.Random, student: Student) -> str:
    """An answer as the student would write it: hasty, with a slip, or careful."""
    mood = rng.random()
    if mood < student.hasty:
        return f"\\boxed{{{evaluate(*problem.working[0])}}}"
    if mood < student.hasty + student.slip:
        return _written(_with_slip(problem, rng))
    return solution(problem)


def evaluate(left: int, operation: str, right: int) -> int:
    """The result of one equation."""
    if operation == "*":
        return left * right
    return left + right if operation == "+" else left - right


def texts() -> Iterator[str]:
    """Texts that between them contain every word of questions and answers, for the tokenizer's vocabulary."""
    for kind in KINDS:
        for wording in kind.wordings:
            for turn, (name, thing) in enumerate(zip(NAMES, THINGS, strict=True)):
                place = PLACES[turn % len(PLACES)]
                yield wording.format(A=name, B=name, C=name, t=thing, p=place, a=1, b=2, c=3)
    yield "1+2=3; 3-1=2; 1*2=2; \\boxed{2}"
    yield "\\boxed{2}"
    yield from (str(number) for number in range(LARGEST + 1))


def _with_slip(problem: ArithmeticProblem, rng: random.Random) -> tuple[tuple[int, str, int], ...]:
    """The working with one operation replaced; later steps go on from the wrong result."""
    steps = list(_kind(problem.kind).steps)
    slipped = rng.randrange(len(steps))
    operation, left, right = steps[slipped]
    others = [other for other in "+-*" if other != operation]
    rng.shuffle(others)

    for other in others:
        steps[slipped] = (other, left, right)
        working = _work(tuple(steps), problem.numbers)
        if all(0 <= evaluate(*equation) <= LARGEST for equation in working):
            return working

    return problem.working[:1]  # no other operation stays in range: stops too early instead


def _work(steps: tuple[Step, ...], numbers: tuple[int, ...]) -> tuple[tuple[int, str, int], ...]:
    values = list(numbers)
    working = []
    for operation, left, right in steps:
        equation = (values[left], operation, values[right])
        working.append(equation)
        values.append(evaluate(*equation))
    return tuple(working)


def _written(working: tuple[tuple[int, str, int], ...]) -> str:
    lines = [f"{left}{operation}{right}={evaluate(left, operation, right)}; " for left, operation, right in working]
    return "".join(lines) + f"\\boxed{{{evaluate(*working[-1])}}}"


@cache
def _kind(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


@cache
def combinations(split: str, kind_index: int) -> tuple[tuple[int, ...], ...]:
    """All numbers of a kind that belong to the split and stay within 0 .. LARGEST in every step."""
    if split not in ("train", "eval"):
        raise ValueError(f"split={split!r}: must be train or eval")
    kind = KINDS[kind_index]
    found = []
    for numbers in product(*kind.ranges):
        held_out = zlib.crc32(f"{kind.name} {numbers}".encode()) < EVAL_SHARE * 2**32
        if held_out == (split == "eval") and all(
            0 <= evaluate(*equation) <= LARGEST for equation in _work(kind.steps, numbers)
        ):
            found.append(numbers)
    return tuple(found)


@lru_cache(maxsize=64)
def _order(split: str, kind_index: int, seed: int) -> tuple[tuple[int, ...], ...]:
    shuffled = list(combinations(split, kind_index))
    random.Random(f"{split} {kind_index} {seed}").shuffle(shuffled)
    return tuple(shuffled)
