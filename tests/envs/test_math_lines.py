"""A gold line that is solved for its last coordinate is one equation among many of the same line, and no more."""

from __future__ import annotations

import random
import time
from fractions import Fraction

import pytest

from envs.math.answers import MAX_ANSWER_CHARS, judge


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("y=2x+3", "2x-y+3=0"),
        ("y=2x+3", "y-2x=3"),
        ("y=2x+3", "0=4x-2y+6"),
        ("y=2x+3", "y-3=2x"),
        ("y=2x+3", "x=\\frac{y-3}{2}"),
        ("y=2x+3", "2x+3=y"),
        ("y=2x+3", "2x+3"),
        ("y=-\\frac{2}{3}x+\\frac{1}{2}", "4x+6y=3"),
        ("$y = 0.5x$", "x-2y=0"),
        ("y=x", "x=y"),
        ("z=x-2y+1", "x-2y-z=-1"),
    ],
)
def test_another_equation_of_the_line_is_right(gold: str, answer: str) -> None:
    assert judge(gold, answer) is True


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("y=2x+3", "0=0"),
        ("y=2x+3", "y=y"),
        ("y=2x+3", "2x+3=2x+3"),
        ("y=2x+3", "0\\cdot(2x-y+3)=0"),
        ("y=2x+3", "2x-y+3=1"),
        ("y=2x+3", "2x-y-3=0"),
        ("y=2x+3", "2x+y+3=0"),
        ("y=2x+3", "x(2x-y+3)=0"),
        ("y=2x+3", "2x^2+3x-xy=0"),
        ("y=2x+3", "(2x-y+3)^2=0"),
        ("y=2x+3", "2x-y+3"),
        ("y=2x+3", "2x-y+3>0"),
        ("y=2x+3", "2x-y+3=0, x=1"),
        ("y=2x+3", "y=2x+3=0"),
        ("y=2x+3", "2a-b+3=0"),
        ("y=2x+3", "x=2y+3"),
        ("y=2x+3", "z=2x+3"),
        ("y=2x+3", "k(2x-y+3)=0"),
        ("y=5", "y-5=0"),  # a value
        ("x=5", "x-5=0"),
        ("x=5", "2x=10"),
        ("x=2y", "2x=4y"),  # solved for another letter: that may be what is asked for
        ("s=2t", "2s=4t"),
        ("y=x^2", "x^2-y=0"),
        ("y=ax", "ax-y=0"),
        ("2x+3", "2x+3=0"),
        ("2x+3", "y=2x+4"),
    ],
)
def test_what_says_something_else_or_nothing_is_wrong(gold: str, answer: str) -> None:
    assert judge(gold, answer) is False


def test_the_same_form_is_that_of_the_gold() -> None:
    assert judge("y=2x+3", "2x-y+3=0", "same form") is False
    assert judge("y=2x+3", "y=3+2x", "same form") is True


def test_random_lines_are_equal_exactly_where_they_are_proportional() -> None:
    dice = random.Random(7)
    right = 0
    for _ in range(2000):
        m, b, factor = (Fraction(dice.randint(-6, 6) or 1, dice.randint(1, 4)) for _ in range(3))
        terms = [factor * m, -factor, factor * b]  # of x, of y, and alone
        same = dice.random() < 0.5
        if not same:
            terms[dice.randrange(3)] += dice.choice((-1, 1)) * Fraction(1, dice.randint(1, 3))

        a, c, d = (f"({each})" for each in terms)
        verdict = judge(f"y=({m})x+({b})", f"{a}x+{c}y=-{d}")
        assert verdict is same, (m, b, terms)
        right += same
    assert 800 < right < 1200


@pytest.mark.parametrize("answer", ["(x+y+1)^8" * 20, "(" * 140 + "x" + ")" * 140, "x^" * 140 + "2", "9^9^9^9y"])
def test_a_hostile_equation_takes_no_time(answer: str) -> None:
    begin = time.process_time()
    assert judge("y=2x+3", f"{answer}=0"[:MAX_ANSWER_CHARS]) is False
    assert time.process_time() - begin < 1.0
