"""The types of an answer, and what an answer is read as: exact, whole, and in the type that the gold has.

`Value` is a tree: lists, sets, intervals and matrices hold values, and the leaves hold numbers, expressions or texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from envs.math import exact
from envs.math.reading import Node

Listing = Literal["interval", "union", "set", "list", "ordered list", "tuple", "matrix"]
Kind = Literal["number", "percentage", Listing, "expression", "equation", "inequality", "unit", "text"]
LEAVES = ("number", "expression", "text")
Equal = Callable[[Node, Node], "bool | None"]
"""Whether two expressions are equal; None: unknown here."""
Proportional = Callable[[Node, Node], "bool | None"]


@dataclass(frozen=True)
class Value:
    """`mark` is what else has to agree: brackets, a unit, relations, a name that stands before `=`.

    `text` is that of a text, and of an expression of letters alone.
    """

    kind: Kind
    parts: tuple[Value, ...] = ()
    node: Node = ()
    text: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Judge:
    """Compares values; what it may not know by itself it asks `equal` and `proportional`."""

    equal: Equal
    proportional: Proportional
    same_form: bool = False

    def agree(self, gold: Value, answer: Value) -> bool | None:
        """None: unknown here. The answer has the gold's type, or one that says the same."""
        if gold.kind in ("number", "expression") and answer.kind in ("number", "expression"):
            return self._expressions(gold, answer)
        if gold.kind == "text" or answer.kind == "text":
            return gold.kind == answer.kind and gold.text == answer.text
        if gold.mark != answer.mark or not _same_kind(gold.kind, answer.kind):
            return False
        if len(gold.parts) != len(answer.parts):
            return False

        if gold.kind == "equation":
            return self._equations(gold, answer)
        if gold.kind in ("set", "list", "union"):
            return self._unordered(list(gold.parts), list(answer.parts))
        return _all([self.agree(*pair) for pair in zip(gold.parts, answer.parts, strict=True)])

    def _expressions(self, gold: Value, answer: Value) -> bool | None:
        """A gold number is matched by a written-out one only: anything else restates the question.

        Letters side by side are a product, but in another order they may as well be another word.
        """
        if gold.kind == "number" and answer.kind != "number":
            return False
        if gold.text and answer.text and gold.text != answer.text:
            return False
        if self.same_form and gold.kind == "expression" and exact.flat(gold.node) != exact.flat(answer.node):
            return False
        return self.equal(gold.node, answer.node)

    def _unordered(self, gold: list[Value], answer: list[Value]) -> bool | None:
        """Each member has its own partner: equality is transitive, so that the first one found will do."""
        unknown = False
        for member in gold:
            verdicts = [self.agree(member, each) for each in answer]
            if True in verdicts:
                answer.pop(verdicts.index(True))
            elif None in verdicts:
                unknown = True
            else:
                return False
        return None if unknown else True

    def _equations(self, gold: Value, answer: Value) -> bool | None:
        sides = _all([self.agree(*pair) for pair in zip(gold.parts, answer.parts, strict=True)])
        nodes = [each.node for each in (*gold.parts, *answer.parts)]
        if sides or self.same_form or not all(nodes):
            return sides
        one, other, third, fourth = nodes
        return self.proportional(("add", one, ("neg", other)), ("add", third, ("neg", fourth)))


def _same_kind(gold: Kind, answer: Kind) -> bool:
    """A list of values without an order is a set, whether it has its braces or not."""
    return gold == answer or {gold, answer} == {"set", "list"}


def _all(verdicts: list[bool | None]) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts else True


_INTEGER = r"\d+|\d{1,3}(?:,\d{3})+"
_DECIMAL = re.compile(rf"([+-]?)((?:{_INTEGER})(?:\.\d*)?|\.\d+)")
_SCIENTIFIC = re.compile(
    r"([+-]?\d+(?:\.\d+)?) ?(?:[eE]|(?:\\times|\\cdot) ?10 ?\^ ?)(?:\{ ?([+-]?\d{1,3}) ?\}|([+-]?\d{1,3}))"
)
_PART = r"(?:\{ ?([+-]?\d+) ?\}|(\d))"
_FRACTION = re.compile(rf"([+-]?) ?(?:(\d+) ?)?\\frac ?{_PART} ?{_PART}")
_SLASHED = re.compile(r"([+-]?) ?(?:(\d+)(?: |\+))?(\d+) ?/ ?(-?\d+)")


def literal(text: str, restated: bool = False) -> Fraction | None:
    """The value of a written-out number: integer, decimal, scientific, or one fraction, with a whole number or not.

    A fraction counts in lowest terms and not for a whole number, unless it may be `restated`. None for anything else.
    """
    decimal = _DECIMAL.fullmatch(text)
    if decimal is not None:
        return Fraction(text.replace(",", ""))
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific is not None:
        braced = "e" in text or "E" in text or scientific[2] is not None or len(scientific[3]) == 1
        return Fraction(scientific[1]) * Fraction(10) ** int(scientific[2] or scientific[3]) if braced else None

    found = _FRACTION.fullmatch(text) or _SLASHED.fullmatch(text)
    if found is None:
        return None
    above, below = (int(group) for group in found.groups()[2:] if group is not None)
    return _fraction(found[1] == "-", found[2], above, below, restated)


def _fraction(negative: bool, whole: str | None, above: int, below: int, restated: bool) -> Fraction | None:
    if below == 0:
        return None
    value = Fraction(above, below)
    if not restated and (value.denominator != abs(below) or value.denominator == 1):
        return None
    if whole is not None:
        if not 0 < above < below or whole == "0":
            return None
        value += int(whole)
    return -value if negative else value
