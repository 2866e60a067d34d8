"""Pairs of answers whose verdict is known without the verifier: written by hand, or made from different numbers.

No false accept is allowed, in either; of the written pairs, two right answers may be refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from envs.math import algebra
from envs.math.answers import Symbolic, decide, judge, typed
from envs.math.values import Judge
from tests.envs.blind_pairs import FILE, pairs

PAIRS = [json.loads(line) for line in (Path(__file__).parent / "math_pairs.jsonl").read_text().splitlines()]
MAY_REFUSE = 2
MADE = 2_000
"""Of the machine-made pairs; 25 000 were run once, without a false accept."""


def accepted(gold: str, answer: str, asked: str = "") -> bool:
    """What a verifier says, in this process and without a limit."""
    verdict = judge(gold, answer, asked)
    if isinstance(verdict, Symbolic):
        by = Judge(algebra.equal, algebra.proportional, typed(gold, asked).same_form)
        verdict = decide(gold, answer, by, asked) is True
    return verdict


def test_written_pairs() -> None:
    assert len(PAIRS) >= 500 and sum(pair["equal"] for pair in PAIRS) * 2 == len(PAIRS)
    verdicts = [(pair, accepted(pair["gold"], pair["answer"])) for pair in PAIRS]
    assert not [pair for pair, verdict in verdicts if verdict and not pair["equal"]]
    refused = [pair for pair, verdict in verdicts if pair["equal"] and not verdict]
    assert len(refused) <= MAY_REFUSE, refused


def test_blind_pairs() -> None:
    """Made without a look at the verifier, in notations of their own; the verdicts are those of exact fractions."""
    blind = [json.loads(line) for line in FILE.read_text().splitlines()]
    assert blind == pairs() and len(blind) == 500 and sum(pair["equal"] for pair in blind) == 250
    verdicts = [(pair, accepted(pair["gold"], pair["answer"])) for pair in blind]
    assert not [pair for pair, verdict in verdicts if verdict and not pair["equal"]]
    refused = [pair for pair, verdict in verdicts if pair["equal"] and not verdict]
    assert len(refused) <= MAY_REFUSE, refused


def fraction(dice: random.Random, value: Fraction) -> str:
    """One of its written-out notations."""
    above = abs(value.numerator)
    below = value.denominator
    sign = "-" if value < 0 else ""
    if below == 1:
        return sign + dice.choice(
            [str(above), f"{above}.0", f"{above:,}", f"{above:,}".replace(",", "\\,"), f"+{above}"[bool(sign) :]]
        )

    command = dice.choice(["frac", "dfrac", "tfrac", "cfrac"])
    forms = [
        f"{sign}\\{command}{{{above}}}{{{below}}}",
        f"\\{command}{{{sign}{above}}}{{{below}}}",
        f"{sign}{above}/{below}",
    ]
    if above > below:
        forms.append(f"{sign}{above // below}\\{command}{{{above % below}}}{{{below}}}")
    digits = 0
    while below != 1 and (10**digits) % below and digits < 12:
        digits += 1
    if (10**digits) % below == 0:
        whole = str(above * 10**digits // below).rjust(digits + 1, "0")
        forms.append(f"{sign}{whole[:-digits]}.{whole[-digits:]}")
    return dice.choice(forms)


def drawn(dice: random.Random) -> Fraction:
    """Of all sizes, down to the smallest."""
    value = Fraction(dice.randint(-60, 60), dice.choice([1, 1, 2, 3, 4, 5, 8, 7, 12, 1000]))
    return value * Fraction(10) ** dice.choice([0, 0, 0, 0, 3, -3])


def different(dice: random.Random, value: Fraction) -> Fraction:
    """Near to it more often than not."""
    near = [
        -value,
        value + 1,
        value * 10,
        value / 100,
        value * 100,
        value + Fraction(1, 10 ** dice.randint(3, 12)),
        1 / value if value else Fraction(1),
        value * (1 + Fraction(1, 10 ** dice.randint(6, 9))),
        drawn(dice),
    ]
    return dice.choice([each for each in near if each != value])


def surd(dice: random.Random, part: tuple[Fraction, Fraction, int]) -> str:
    """`a+b\\sqrt r`, in one of its notations."""
    rational, factor, root = part
    written = f"\\frac{{{factor.numerator}}}{{{factor.denominator}}}"
    times = dice.choice([1, 1, 2, 3])
    term = f"{written}\\cdot\\frac{{1}}{{{times}}}\\sqrt{{{root * times * times}}}"
    number = f"\\frac{{{rational.numerator}}}{{{rational.denominator}}}"
    return dice.choice([f"{number}+{term}", f"{term}+{number}", f"{number}-\\left(-{term}\\right)"])


def polynomial(dice: random.Random, factors: tuple[int, ...]) -> str:
    """By its coefficients, lowest first; or with a term taken apart."""
    terms = [f"({factor})x^{{{power}}}" for power, factor in enumerate(factors)]
    if dice.random() < 0.5:
        terms.append(f"({factors[0]})")
        terms[0] = "0\\cdot x"
    dice.shuffle(terms)
    return "+".join(terms)


def tiny(dice: random.Random, part: tuple[int, int]) -> str:
    factor, power = part
    return dice.choice(
        [
            f"\\frac{{{factor}}}{{2^{{{power}}}}}",
            f"{factor}\\cdot2^{{-{power}}}",
            f"\\frac{{{2 * factor}}}{{2^{{{power + 1}}}}}",
        ]
    )


def many(dice: random.Random, values: tuple[Fraction, ...], opening: str, closing: str) -> str:
    separator = ", " if any(abs(each) > 99 for each in values) else dice.choice([",", ", ", ",\\;"])
    return opening + separator.join(fraction(dice, each).replace("\\,", "") for each in values) + closing


def number_pair(dice: random.Random) -> tuple[str, str, bool]:
    value = drawn(dice)
    other = value if dice.random() < 0.3 else different(dice, value)
    mark = dice.choice(
        [("", ""), ("", ""), ("\\%", " \\%"), ("\\text{ cm}", "\\mathrm{~cm}"), ("\\%", ""), ("", "\\%")]
    )
    same = value == other and mark not in (("\\%", ""), ("", "\\%"))
    return fraction(dice, value) + mark[0], fraction(dice, other) + mark[1], same


def listed_pair(dice: random.Random) -> tuple[str, str, bool]:
    values = tuple(drawn(dice) for _ in range(dice.randint(2, 4)))
    others = list(values)
    if dice.random() < 0.6:
        at = dice.randrange(len(values))
        others[at] = different(dice, values[at])
    elif dice.random() < 0.3:
        others.append(dice.choice(others))
    elif dice.random() < 0.5:
        dice.shuffle(others)

    brackets = dice.choice([("", ""), ("\\{", "\\}"), ("(", ")"), ("\\left[", "\\right]")])
    ordered = brackets[0] in ("(", "\\left[")
    same = tuple(others) == values if ordered else sorted(others) == sorted(values)
    return many(dice, values, *brackets), many(dice, tuple(others), *brackets), same


def surd_pair(dice: random.Random) -> tuple[str, str, bool]:
    value = (drawn(dice), drawn(dice) or Fraction(1), dice.choice([2, 3, 5, 6, 7]))
    other = dice.choice(
        [value, (different(dice, value[0]), *value[1:]), (value[0], different(dice, value[1]), value[2])]
    )
    return surd(dice, value), surd(dice, other), value == other


def polynomial_pair(dice: random.Random) -> tuple[str, str, bool]:
    value = tuple(dice.randint(-9, 9) for _ in range(dice.randint(2, 4)))
    other = list(value)
    if dice.random() < 0.7:
        other[dice.randrange(len(other))] += dice.choice([-1, 1, 10])
    return polynomial(dice, value) + "+x^5", polynomial(dice, tuple(other)) + "+x^5", tuple(other) == value


def tiny_pair(dice: random.Random) -> tuple[str, str, bool]:
    value = (dice.choice([1, 3, 5, 7]), dice.randint(40, 300))
    other = dice.choice([value, (value[0] + 2, value[1]), (value[0], value[1] + 1), (-value[0], value[1])])
    return tiny(dice, value), tiny(dice, other), value == other


MAKERS: list[Callable[[random.Random], tuple[str, str, bool]]] = [
    number_pair,
    number_pair,
    listed_pair,
    surd_pair,
    polynomial_pair,
    tiny_pair,
]


def wrong_verdicts(count: int, seed: int) -> tuple[list[tuple[str, str]], list[tuple[str, str]], int]:
    """(False accepts, false refusals, how many pairs are different) of so many pairs."""
    dice = random.Random(seed)
    accepts = []
    refusals = []
    unequal = 0
    for _ in range(count):
        gold, answer, same = dice.choice(MAKERS)(dice)
        verdict = accepted(gold, answer)
        unequal += not same
        if verdict and not same:
            accepts.append((gold, answer))
        elif same and not verdict:
            refusals.append((gold, answer))
    return accepts, refusals, unequal


def test_made_pairs() -> None:
    accepts, refusals, unequal = wrong_verdicts(MADE, seed=0)
    assert not accepts, accepts[:5]
    assert unequal > MADE / 2 and len(refusals) < MADE / 100, refusals[:20]
