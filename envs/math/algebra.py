"""Equality that needs an algebra system: proven by exact steps of SymPy, or refused. It runs in worker processes.

Fifty digits at random points may refuse, and never accept: what looks equal must also be shown to be.

What SymPy raises over the answer alone makes it a wrong one, as if it could not be read: nobody is spared a zero by
what he writes. Over the gold, or in the proof of what has the gold's digits, it is raised: the verifier has failed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import sympy

from envs.math import exact
from envs.math.reading import Node

DIGITS = 60
_POINTS = 3
_AT = sympy.Rational(17, 5)
_FUNCTIONS: dict[str, Any] = {
    **{
        name: getattr(sympy, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "cot", "sec", "csc", "exp")
    },
    **{f"arc{name}": getattr(sympy, f"a{name}") for name in ("sin", "cos", "tan")},
    "ln": sympy.log,
    "lg": lambda inner: sympy.log(inner) / sympy.log(10),
    "abs": sympy.Abs,
    "floor": sympy.floor,
    "ceil": sympy.ceiling,
    "factorial": sympy.factorial,
    "binomial": sympy.binomial,
    "degree": lambda inner: inner * sympy.pi / 180,
}
_CONSTANTS = {"e": sympy.E, "i": sympy.I, "\\pi": sympy.pi}
_UNDEFINED = (sympy.zoo, sympy.nan, sympy.oo, -sympy.oo)


def equal(gold: Node, answer: Node) -> bool:
    """Whether both provably have the same value; what has none equals nothing but itself."""
    known = exact.equal(gold, answer)
    return known if known is not None else _proven(expression(gold), lambda: expression(answer), _is_zero)


def proportional(gold: Node, answer: Node) -> bool:
    """Whether one is the other times a constant that is not 0."""
    wanted = expression(gold)

    def scaled() -> Any:
        """The answer with the gold's value at one point."""
        said = expression(answer)
        if sympy.expand(said) == 0:
            return sympy.nan
        quotient = wanted / said
        return said * quotient.subs({symbol: _AT for symbol in quotient.free_symbols})

    def constant(difference: Any) -> bool:
        quotient = sympy.cancel(wanted / expression(answer))
        return bool(quotient.is_number and quotient.is_nonzero)

    return _proven(wanted, scaled, constant)


def _proven(wanted: Any, answer: Callable[[], Any], proof: Callable[[Any], bool]) -> bool:
    """Whether the difference has no digits, and is proven to be 0."""
    looks_zero: bool | None = None
    try:
        difference = wanted - answer()
        if difference.has(*_UNDEFINED):
            return False
        looks_zero = difference == 0 or _looks_zero(difference)
        return looks_zero is not False and proof(difference)
    except Exception:
        if looks_zero:
            raise
        _looks_zero(wanted)
        return False


def expression(node: Node) -> Any:
    kind = node[0]
    if kind == "num":
        return sympy.Rational(node[1].numerator, node[1].denominator)
    if kind == "sym":
        return _CONSTANTS.get(node[1]) or sympy.Symbol(node[1].replace("\\", "greek_"))
    if kind == "inf":
        return sympy.oo
    if kind == "fn":
        return _function(node[1], [expression(each) for each in node[2:]])

    parts = [expression(each) for each in node[1:]]
    if kind == "neg":
        return -parts[0]
    if kind == "add":
        return parts[0] + parts[1]
    if kind == "mul":
        return parts[0] * parts[1]
    return parts[0] / parts[1] if kind == "div" else sympy.Pow(*parts)


def _function(name: str, arguments: list[Any]) -> Any:
    if name.startswith("apply "):
        return sympy.Function(name)(*arguments)
    if name == "log":  # without a base it may be that of 10 or of e: an unknown one
        base = arguments[1] if len(arguments) > 1 else sympy.Symbol("base_of_log")
        return sympy.log(arguments[0]) / sympy.log(base)
    if name == "root":
        return _root(*arguments)
    return _FUNCTIONS[name](*arguments)


def _root(inner: Any, degree: Any) -> Any:
    """Odd ones of negative numbers are real."""
    if degree.is_odd and inner.is_negative:
        return -sympy.Pow(-inner, 1 / degree)
    return sympy.Pow(inner, 1 / degree)


def _looks_zero(difference: Any) -> bool | None:
    """Whether it is next to 0, to many digits, wherever it has a value; None: it was found to have none."""
    dice = random.Random(0)
    valued: bool | None = None
    symbols = sorted(difference.free_symbols, key=str)
    for _ in range(_POINTS if symbols else 1):
        point = {symbol: sympy.Rational(dice.randint(1, 400), dice.randint(100, 137)) for symbol in symbols}
        value = difference.subs(point).evalf(DIGITS, maxn=4 * DIGITS)
        if value.is_number and value.is_finite:
            if sympy.Abs(value) > sympy.Rational(1, 10**DIGITS):
                return False
            valued = True
    return valued


def _is_zero(difference: Any) -> bool:
    """Shown by exact steps, cheap ones first."""
    if difference == 0:
        return True
    for step in (sympy.expand, sympy.cancel, sympy.radsimp, sympy.trigsimp, sympy.simplify):
        difference = step(difference)
        if difference == 0:
            return True
    if difference.free_symbols or not difference.is_algebraic:
        return False
    unknown = sympy.Symbol("unknown")
    return bool(sympy.minimal_polynomial(difference, unknown) == unknown)
