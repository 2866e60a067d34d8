"""What counts as an answer, and whether it is right: pure functions, no algebra system, microseconds.

The rule is *never accept what is wrong*; a right answer in an unusual form may be lost, and the model learns the usual
one. An answer is the content of the **last** `\\boxed{…}` with balanced braces; a number outside any box is none.

The gold answer has a type (`values.Kind`), decided once, and an answer is read in that type, exactly: nothing is
rounded, and nothing is dropped unread. `judge` decides what needs whole numbers only, and leaves the rest to a worker,
which runs the same `decide` with an algebra system.

* What cannot be read, or in two ways, is a text, and equal to the same text only.
* A gold number is matched by a *written-out* number only: `\\boxed{12+30}` or `\\frac{84}{2}` restate the question.
* A percent sign stands in both or in neither (`50\\%` is not 50, nor 0.5).
* A gold value with a unit that is known (`units`) may be answered without it; an answer may not add one, but for the
  sign of dollars.
* Letters alone are a product in their own order only: `ab` is `a\\cdot b`, and neither is `ba`; `no` is a word.
* `x=` before a value is dropped; equation chains (`1=\\sqrt3=\\sqrt2`) are texts.
* A gold line or plane, `y=2x+3` or `z=x-2y`, is also answered by another equation of it: a multiple by a rational
  number that is not 0, in whatever order (`2x-y+3=0`). `x=5` and `y=x^2` are values, and stay so.
* Brackets must be the gold's, members count as often as they stand there, and only lists in brackets have an order.
* One capital letter may be a choice: `\\text{(A)}`, `(A)` and `A.` are `A`.
* An answer may not bring in letters that the gold does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from envs.math import exact
from envs.math.cleaning import clean
from envs.math.reading import Node
from envs.math.types import assigned, choice, value_of
from envs.math.values import Judge, Kind, Value

MAX_ANSWER_CHARS = 300
"""A longer answer is wrong, unread: algebra is superlinear and model output is hostile."""
SAME_FORM = "same form"
KINDS: tuple[Kind, ...] = get_args(Kind)
_COORDINATES = {"y": "x", "z": "xy"}

_BOX = re.compile(r"\\boxed\s*\{")
_MENTION = re.compile(r"\\boxed\s*\{\s*(?:\.{3}|…|\\[lc]?dots)?\s*\}")
"""A box without an answer: what is said about boxes, not in one."""


@dataclass(frozen=True)
class Symbolic:
    """Two answers whose equality is left to an algebra system; `asked` is what the data say of the gold."""

    gold: str
    answer: str
    asked: str = ""


@dataclass(frozen=True)
class Gold:
    """A gold answer in its type."""

    text: str
    value: Value
    variable: str = ""
    same_form: bool = False

    @property
    def kind(self) -> str:
        return f"{self.value.kind}, {SAME_FORM}" if self.same_form else self.value.kind


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{…}` that is no mere mention; None if there is none, or if it is not closed."""
    text = _MENTION.sub("", text)
    found = None
    for found in _BOX.finditer(text):  # noqa: B007
        pass

    if found is None:
        return None

    depth = 1
    position = found.end()
    while position < len(text):
        character = text[position]
        if character == "\\":  # \{ and \} are printed braces, not groups
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[found.end() : position].strip()
        position += 1
    return None


def cut_off(text: str) -> bool:
    """Whether the text ends within its last box."""
    return _BOX.search(text) is not None and last_box(text) is None and last_box(text + "}" * 50) is not None


@lru_cache(maxsize=65_536)
def typed(gold: str, asked: str = "") -> Gold:
    """The gold answer in its type, or in the one that is `asked` for. Raises ValueError."""
    words = [word.strip() for word in asked.split(",") if word.strip()]
    kinds = [kind for kind in KINDS if kind in words]
    unknown = [word for word in words if word not in (*KINDS, SAME_FORM)]
    if unknown or len(kinds) > 1:
        raise ValueError(f"{asked!r} is no type of an answer: one of {', '.join(KINDS)}, and {SAME_FORM!r} if need be")

    cleaned = clean(gold)
    variable, text = assigned(cleaned)
    value = value_of(text, kinds[0] if kinds else None, gold=True)
    if kinds and value.kind != kinds[0]:
        raise ValueError(f"{gold!r} is read as {value.kind}, not as {kinds[0]}")
    return Gold(cleaned, value, variable, SAME_FORM in words)


def judge(gold: str, answer: str, asked: str = "") -> bool | Symbolic:
    """Whether the boxed `answer` equals the bare `gold`; Symbolic where only an algebra system can tell."""
    if len(answer) > MAX_ANSWER_CHARS or not gold.strip():
        return False
    same_form = typed(gold, asked).same_form
    verdict = decide(gold, answer, Judge(exact.equal, exact.proportional, same_form), asked)
    return Symbolic(gold, answer, asked) if verdict is None else verdict


def decide(gold_text: str, answer: str, by: Judge, asked: str = "") -> bool | None:
    """Whether they are equal, as far as `by` can tell; None: unknown."""
    gold = typed(gold_text, asked)
    cleaned = clean(answer)
    if not cleaned or not gold.text:
        return False
    if cleaned == gold.text:
        return True
    letter = choice(gold.text)
    if letter and letter.isupper():
        return letter == choice(cleaned)

    variable, text = assigned(cleaned)
    if variable != gold.variable and _solved_line(gold):
        said = value_of(cleaned, "equation")
        if said.kind == "equation":
            return _same_line(gold, said)

    if variable and gold.variable and variable != gold.variable:
        return False
    value = value_of(cleaned if gold.value.kind == "equation" else text, gold.value.kind)
    wanted = gold.value
    if "unit" in (wanted.kind, value.kind) and wanted.kind != value.kind:
        degrees = "degree" in (wanted.mark + value.mark) and "number" in (wanted.kind, value.kind)
        dollars = "dollar" in value.mark and "$" in answer
        if value.kind == "unit" and not (degrees or dollars):
            return False
        wanted = wanted.parts[0] if wanted.kind == "unit" else wanted
        value = value.parts[0] if value.kind == "unit" else value

    brought = set(_letters(value)) - set(_letters(wanted)) - {"e", "i"}
    measured = "°" in {*_letters(wanted)} ^ {*_letters(value)}
    return False if brought or measured else by.agree(wanted, value)


def _solved_line(gold: Gold) -> bool:
    """Whether it is a line or a plane, solved for its last coordinate; in other letters it may be what is asked for."""
    others = _COORDINATES.get(gold.variable)
    if others is None or gold.value.kind != "expression" or gold.same_form:
        return False
    try:
        terms = set(exact.polynomial(gold.value.node)) - {()}
    except exact.Unknown:
        return False
    return bool(terms) and terms <= {((name, 1),) for name in others}


def _same_line(gold: Gold, said: Value) -> bool:
    """Whether the equation has the gold's solutions: the differences of both sides are multiples of each other."""
    left, right = (side.node for side in said.parts)
    wanted: Node = ("add", ("sym", gold.variable), ("neg", gold.value.node))
    return exact.proportional(wanted, ("add", left, ("neg", right))) is True


def _letters(value: Value) -> Iterator[str]:
    """Names of variables and functions, and the sign of degrees."""
    for part in value.parts:
        yield from _letters(part)
    yield from _names(value.node)


def _names(node: Node) -> Iterator[str]:
    if node[:1] == ("sym",):
        yield node[1]
    elif node[:2] == ("fn", "degree"):
        yield "°"
    elif node[:1] == ("fn",) and node[1].startswith("apply "):
        yield node[1]
    for each in node[1:]:
        if isinstance(each, tuple):
            yield from _names(each)
