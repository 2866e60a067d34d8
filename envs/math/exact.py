"""Equality of expressions that needs no algebra system: rational numbers and polynomials, in whole numbers only."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import comb, factorial

from envs.math.reading import Node

Monomial = tuple[tuple[str, int], ...]
Polynomial = dict[Monomial, Fraction]

MOST_TERMS = 200
MOST_DEGREE = 8
MOST_BITS = 20_000
_MOST_FACTORIAL = 1_000


class Unknown(Exception):
    """Not a rational function with one term below, or too large: an algebra system has to tell."""


def equal(left: Node, right: Node) -> bool | None:
    """Whether both have the same value; None where only an algebra system can tell."""
    if left == right:
        return True
    if infinite(left) or infinite(right):
        return flat(left) == flat(right)

    try:
        one = polynomial(left)
        other = polynomial(right)
    except Unknown:
        return None
    if one == other:
        return True
    imaginary = any(name == "i" for each in (one, other) for monomial in each for name, _ in monomial)
    return None if imaginary else False


def infinite(node: Node) -> bool:
    return node == ("inf",) or any(infinite(each) for each in node[1:] if isinstance(each, tuple))


def number(node: Node) -> Fraction | None:
    """The value of a rational constant; None of anything else."""
    try:
        value = polynomial(node)
    except Unknown:
        return None
    return value.get((), Fraction(0)) if set(value) <= {()} else None


def polynomial(node: Node) -> Polynomial:
    """The sum of terms that a node is; exponents may be negative. Raises Unknown."""
    kind = node[0]
    if kind == "num":
        return _kept({(): node[1]})
    if kind == "sym":
        return {((node[1], 1),): Fraction(1)}
    if kind == "neg":
        return {monomial: -factor for monomial, factor in polynomial(node[1]).items()}

    if kind == "add":
        return _sum(polynomial(node[1]), polynomial(node[2]))
    if kind == "mul":
        return _product(polynomial(node[1]), polynomial(node[2]))
    if kind == "div":
        return _product(polynomial(node[1]), _inverse(polynomial(node[2])))
    if kind == "pow":
        return _power(polynomial(node[1]), number(node[2]))
    return {(): Fraction(_whole_function(node))}


def flat(node: Node) -> Node:
    """The same form: only the order of terms and of factors, and how a quotient is written, are left out."""
    kind = node[0]
    if kind == "num" and node[1].denominator != 1:
        return flat(("div", ("num", Fraction(node[1].numerator)), ("num", Fraction(node[1].denominator))))
    if kind in ("add", "mul"):
        return (kind, *sorted((flat(each) for each in _members(node, kind)), key=repr))
    if kind == "neg":
        inner = flat(node[1])
        return inner[1] if inner[0] == "neg" else ("neg", inner)

    if kind == "div":
        return flat(("mul", node[1], ("over", node[2])))
    return (kind, *(flat(each) if isinstance(each, tuple) else each for each in node[1:]))


def _members(node: Node, kind: str) -> Iterator[Node]:
    for each in node[1:]:
        if each[0] == kind:
            yield from _members(each, kind)
        elif kind == "mul" and each[0] == "div":
            yield from _members(("mul", each[1], ("over", each[2])), kind)
        else:
            yield each


def _whole_function(node: Node) -> int:
    arguments = [number(each) for each in node[2:]] if node[0] == "fn" else []
    if node[:2] == ("fn", "factorial") and arguments[0] is not None:
        return factorial(_whole(arguments[0]))
    if node[:2] == ("fn", "binomial") and None not in arguments:
        above, below = (_whole(each) for each in arguments if each is not None)
        return comb(above, below)
    raise Unknown


def _whole(value: Fraction) -> int:
    if value.denominator != 1 or not 0 <= value <= _MOST_FACTORIAL:
        raise Unknown
    return int(value)


def _sum(left: Polynomial, right: Polynomial) -> Polynomial:
    total = dict(left)
    for monomial, factor in right.items():
        total[monomial] = total.get(monomial, Fraction(0)) + factor
    return _kept(total)


def _product(left: Polynomial, right: Polynomial) -> Polynomial:
    if len(left) * len(right) > MOST_TERMS:
        raise Unknown
    total: Polynomial = {}
    for one, factor in left.items():
        for other, times in right.items():
            powers = dict(one)
            for name, exponent in other:
                powers[name] = powers.get(name, 0) + exponent
            monomial = tuple(sorted((name, exponent) for name, exponent in powers.items() if exponent))
            total[monomial] = total.get(monomial, Fraction(0)) + factor * times
    return _kept(total)


def _inverse(value: Polynomial) -> Polynomial:
    if len(value) != 1:
        raise Unknown
    ((monomial, factor),) = value.items()
    return {tuple((name, -exponent) for name, exponent in monomial): 1 / factor}


def _power(base: Polynomial, exponent: Fraction | None) -> Polynomial:
    if exponent is None or exponent.denominator != 1:
        raise Unknown
    times = int(exponent)
    if times < 0 or (not base and times == 0):
        base = _inverse(base)
    times = abs(times)

    if set(base) == {()}:
        bits = max(base[()].numerator.bit_length(), base[()].denominator.bit_length())
        if bits * times > MOST_BITS:
            raise Unknown
        return {(): base[()] ** times}
    if times > MOST_DEGREE and len(base) != 1:
        raise Unknown
    if times > MOST_BITS:
        raise Unknown
    return _repeated(base, times)


def _repeated(base: Polynomial, times: int) -> Polynomial:
    if len(base) == 1:
        ((monomial, factor),) = base.items()
        if factor not in (1, -1) and times > MOST_DEGREE:
            raise Unknown
        return {tuple((name, exponent * times) for name, exponent in monomial if times): factor**times}

    total: Polynomial = {(): Fraction(1)}
    for _ in range(times):
        total = _product(total, base)
    return total


def _kept(value: Polynomial) -> Polynomial:
    """Without terms that vanish. Raises Unknown if it is too large to go on with."""
    kept = {monomial: factor for monomial, factor in value.items() if factor}
    if len(kept) > MOST_TERMS:
        raise Unknown
    for factor in kept.values():
        if factor.numerator.bit_length() + factor.denominator.bit_length() > 4 * MOST_BITS:
            raise Unknown
    return kept


def proportional(left: Node, right: Node) -> bool | None:
    """Whether one is the other times a number that is not 0; None where only an algebra system can tell."""
    try:
        one = polynomial(left)
        other = polynomial(right)
    except Unknown:
        return None
    if not one or not other:
        return False
    monomial = min(one)
    factor = one[monomial] / other[monomial] if monomial in other else Fraction(0)
    if factor and one == {each: factor * value for each, value in other.items()}:
        return True
    return None if any(name in ("e", "i", "\\pi") for each in (*one, *other) for name, _ in each) else False
