"""Writes `math_blind_pairs.jsonl`: pairs of answers whose verdict is known from exact fractions and sets.

It imports nothing of the verifier. Each kind of value is drawn, written in several notations by the small functions
here, and paired with itself (equal) or with a value that differs in one place (not equal).

    python -m tests.envs.blind_pairs
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

FILE = Path(__file__).parent / "math_blind_pairs.jsonl"
OF_EACH = 25
"""Pairs that are equal, and as many that are not, of each of the ten kinds."""
Value = tuple[Fraction, ...]
Kind = tuple[Callable[[random.Random], Value], Callable[[Value], str], Callable[[Value, random.Random], str], bool]
"""(draw, gold's text, an answer's text, whether the order of the members counts)"""


def rational(dice: random.Random) -> Fraction:
    while True:
        value = Fraction(dice.randint(-90, 90), dice.choice([2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 16]))
        if value.denominator > 1:
            return value


def whole(dice: random.Random) -> Fraction:
    return Fraction(dice.choice([1, -1]) * dice.randint(2, 9999))


def plain(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def spelled(value: Fraction, dice: random.Random) -> str:
    """One of the ways in which people write a number in LaTeX."""
    sign = "-" if value < 0 else ""
    above, below = abs(value.numerator), value.denominator
    if below == 1:
        grouped = f"{above:,}"
        return sign + dice.choice(
            [str(above), f"{above}.00", grouped.replace(",", "{,}"), grouped.replace(",", "\\,"), f"{{{above}}}"]
        )

    forms = [
        f"{sign}\\dfrac {{{above}}} {{{below}}}",
        f"{sign} \\tfrac{{{above}}}{{{below}}}",
        f"{sign}{above} / {below}",
    ]
    forms.append(f"\\frac{{{sign}{above}}}{{{below}}}")
    if above > below:
        forms.append(f"{sign}{above // below} \\frac{{{above % below}}}{{{below}}}")
    if 1000 % below == 0:
        digits = str(above * 1000 // below).rjust(4, "0")
        forms.append(f"{sign}{digits[:-3]}.{digits[-3:]}")
    return dice.choice(forms)


def one(value: Value, dice: random.Random) -> str:
    return dice.choice(["{}", "\\displaystyle {}", "\\({}\\)", "{}\\,", "$ {} $"]).format(spelled(value[0], dice))


def scientific(value: Value, dice: random.Random) -> str:
    head, exponent = value
    times = dice.choice([" \\times 10^{", " \\cdot 10^{", "\\times 10 ^{"])
    return f"{float(head):g}{times}{exponent}}}"


def percent(value: Value, dice: random.Random) -> str:
    return spelled(value[0], dice) + dice.choice(["\\%", " \\%", "\\,\\%", "\\text{ percent}"])


def listed(value: Value, dice: random.Random) -> str:
    members = [spelled(each, dice) for each in dice.sample(value, len(value))]
    return dice.choice(["\\{{ {} \\}}", "\\left\\{{{}\\right\\}}", "\\lbrace {} \\rbrace"]).format(",\\ ".join(members))


def tupled(value: Value, dice: random.Random) -> str:
    members = ",\\; ".join(spelled(each, dice) for each in value)
    return dice.choice(["\\left( {} \\right)", "\\bigl({}\\bigr)", "({})"]).format(members)


def interval(value: Value, dice: random.Random) -> str:
    left, right = sorted(value)
    return dice.choice(["\\left[ {}, {} \\right)", "[{} ,\\, {})", "\\big[{}, {}\\big)"]).format(
        spelled(left, dice), spelled(right, dice)
    )


def quadratic(value: Value, dice: random.Random) -> str:
    """x^2 + bx + c with these whole roots."""
    first, second = dice.sample(value, 2)
    b, c = int(-first - second), int(first * second)
    middle = {0: "", 1: "+x", -1: "-x"}.get(b, f"{b:+d}x")
    factors = "".join(f"(x{int(-root):+d})" for root in (first, second))
    return dice.choice([factors, factors.replace(")(", ") \\cdot ("), f"{c}{middle} + x^2", f"x^{{2}}{middle}{c:+d}"])


def line(value: Value, dice: random.Random) -> str:
    """ax + by = c, times a number."""
    factor = dice.choice([1, 2, -3])
    a, b, c = (int(each) * factor for each in value)
    return dice.choice(
        [f"{a}x {b:+d}y = {c}", f"{b}y {a:+d}x = {c}", f"{a}x {b:+d}y {-c:+d} = 0", f"{c} = {a}x {b:+d}y"]
    )


def chain(value: Value, dice: random.Random) -> str:
    left, right = (spelled(each, dice) for each in sorted(value))
    return dice.choice(["{0} \\leq x < {1}", "{1} > x \\geq {0}", "{0}\\leqslant x\\lt {1}"]).format(left, right)


def several(count: int, of: Callable[[random.Random], Fraction]) -> Callable[[random.Random], Value]:
    def draw(dice: random.Random) -> Value:
        while True:
            value = tuple(of(dice) for _ in range(count))
            if len(set(value)) == count:
                return value

    return draw


def small(dice: random.Random) -> Fraction:
    return Fraction(dice.choice([1, -1]) * dice.randint(2, 9))


KINDS: dict[str, Kind] = {
    "integer": (several(1, whole), lambda value: plain(value[0]), one, True),
    "fraction": (several(1, rational), lambda value: plain(value[0]), one, True),
    "percentage": (several(1, rational), lambda value: f"{plain(value[0])}\\%", percent, True),
    "set": (several(3, rational), lambda value: f"\\{{{','.join(map(plain, value))}\\}}", listed, False),
    "tuple": (several(3, rational), lambda value: f"({','.join(map(plain, value))})", tupled, True),
    "interval": (
        several(2, rational),
        lambda value: "[{},{})".format(*map(plain, sorted(value))),
        interval,
        False,
    ),
    "inequality": (several(2, rational), lambda value: "{}\\le x<{}".format(*map(plain, sorted(value))), chain, False),
    "quadratic": (
        several(2, small),
        lambda value: f"x^2{int(-sum(value)):+d}x{int(value[0] * value[1]):+d}",
        quadratic,
        False,
    ),
    "line": (several(3, small), lambda value: f"{value[0]}x{int(value[1]):+d}y={value[2]}", line, True),
    "scientific": (
        lambda dice: (Fraction(dice.randint(11, 99), 10), Fraction(dice.randint(3, 30))),
        lambda value: f"{float(value[0]):g}\\times10^{{{value[1]}}}",
        scientific,
        True,
    ),
}


def other(value: Value, ordered: bool, dice: random.Random) -> Value:
    """Another value: one member differs a little, or the order does where it counts."""
    if ordered and len(value) == 3 and dice.random() < 0.3:
        return (value[1], value[0], value[2])
    place = dice.randrange(len(value))
    near = [value[place] + 1, value[place] - 1]
    changed = (*value[:place], dice.choice(near), *value[place + 1 :])
    return changed if 0 not in changed and len(set(changed)) == len(set(value)) else other(value, ordered, dice)


def same(kind: str, left: Value, right: Value) -> bool:
    """Whether two values are one, by exact arithmetic."""
    if kind == "line":  # one times a number is the other
        return all(left[0] * b == right[0] * a for a, b in zip(left, right, strict=True))
    return left == right if KINDS[kind][3] else sorted(left) == sorted(right)


def pairs() -> list[dict[str, object]]:
    dice = random.Random(20)
    made: dict[tuple[str, str], dict[str, object]] = {}
    for kind, (draw, gold, answer, ordered) in KINDS.items():
        counts = {True: 0, False: 0}
        while min(counts.values()) < OF_EACH:
            value = draw(dice)
            said = value if counts[True] < OF_EACH else other(value, ordered, dice)
            equal = same(kind, value, said)
            texts = (gold(value), answer(said, dice))
            if texts in made or texts[0] == texts[1] or counts[equal] == OF_EACH:
                continue
            counts[equal] += 1
            made[texts] = {"kind": kind, "gold": texts[0], "answer": texts[1], "equal": equal}
    return list(made.values())


if __name__ == "__main__":
    FILE.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs()))
