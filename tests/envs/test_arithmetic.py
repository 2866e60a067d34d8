"""The arithmetic problems: splits that share nothing, determinism, right solutions, and the student's habits."""

from __future__ import annotations

import random
import re
import time

import pytest

from envs.math import arithmetic
from envs.math.answers import last_box
from envs.math.arithmetic import KINDS, ArithmeticProblem, Student

COUNT = 4000


def problems(split: str, seed: int = 0, count: int = COUNT) -> list[ArithmeticProblem]:
    return [arithmetic.problem(split, index, seed) for index in range(count)]


@pytest.mark.parametrize("seeds", [(0, 0), (1, 7)])
def test_no_numbers_of_a_held_out_problem_occur_in_training(seeds: tuple[int, int]) -> None:
    train = problems("train", seeds[0], 20_000)
    held_out = problems("eval", seeds[1])
    assert not {(p.kind, p.numbers) for p in train} & {(p.kind, p.numbers) for p in held_out}
    assert not {p.question for p in train} & {p.question for p in held_out}


def test_the_splits_are_a_partition() -> None:
    for kind in range(len(KINDS)):
        train, held_out = (set(arithmetic.combinations(split, kind)) for split in ("train", "eval"))
        assert train and held_out and not train & held_out
        assert 0.15 < len(held_out) / len(train | held_out) < 0.35
    assert arithmetic.size("train") > 6_000 and arithmetic.size("eval") > 2_000


def test_thousands_of_different_problems() -> None:
    assert len({p.question for p in problems("train", count=10_000)}) > 9_900
    assert len({p.question for p in problems("eval", count=3_000)}) > 2_900


def test_deterministic_and_different_between_seeds() -> None:
    assert problems("train", 3, 200) == problems("train", 3, 200)
    assert problems("train", 3, 200) != problems("train", 4, 200)


def test_unknown_split() -> None:
    with pytest.raises(ValueError, match="train or eval"):
        arithmetic.problem("test", 0)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_solutions_are_right_and_boxed(split: str) -> None:
    for problem in problems(split):
        text = arithmetic.solution(problem)
        assert last_box(text) == problem.answer
        *equations, _ = text.split("; ")
        values = [str(number) for number in problem.numbers]
        for equation in equations:
            left, operation, right, result = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+)", equation).groups()  # type: ignore[union-attr]
            assert left in values and right in values  # every number is given, or was computed before
            assert {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}[
                operation
            ] == int(result)
            values.append(result)

        assert values[-1] == problem.answer
        assert 0 <= int(problem.answer) <= arithmetic.LARGEST
        assert all(str(number) in problem.question for number in problem.numbers)


def test_the_student_is_right_as_often_as_its_habits_say() -> None:
    rng = random.Random(0)

    def right(student: Student) -> float:
        sample = problems("train")
        return sum(last_box(arithmetic.demonstrate(p, rng, student)) == p.answer for p in sample) / len(sample)

    assert right(Student(hasty=0, slip=0)) == 1
    one_step = sum(len(p.working) == 1 for p in problems("train")) / COUNT
    assert right(Student(hasty=1, slip=0)) == pytest.approx(one_step, abs=0.03)  # or right by chance
    assert right(Student(hasty=0, slip=1)) < 0.1
    assert 0.2 < right(Student()) < 0.5


def test_cheap() -> None:
    problems("train", count=100)  # fills the caches
    begin = time.process_time()
    problems("train")
    assert (time.process_time() - begin) / COUNT < 2e-3  # of the processor; 20 us on an idle core
