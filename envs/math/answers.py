"""What counts as an answer, and whether it is right: pure functions, no library, microseconds.

The rule is *never accept what is wrong*; a right answer in an unusual form may be lost, and the model learns the usual
one. An answer is the content of the **last** `\\boxed{…}` with balanced braces; a number outside any box is none.

`judge` decides most cases itself and leaves symbolic ones (roots, polynomials, sets, intervals) to math-verify, after
refusing the forms in which that library accepts wrong answers:

* a gold number is matched by a *literal* number only: `\\boxed{12+30}` or `\\frac{84}{2}` restate the question;
* a percent sign stands in both or in neither (`50\\%` is not 50, nor 0.5);
* text in an answer must be the gold's (`5\\text{ million}`); a textual gold is compared as a string;
* equation chains (`1=\\sqrt3=\\sqrt2`) are refused; `x=` before a value is dropped;
* brackets must be the gold's: `(1,2)` is neither `[1,2]` nor `\\{1,2\\}` nor `2,1`;
* numerals with a base (`11_2`) and ratios (`3:4`) are compared as strings;
* `1e10` is read as `1\\times10^{10}`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_ANSWER_CHARS = 300
"""A longer answer is wrong, unparsed: parsers are superlinear and model output is hostile."""

_BOX = re.compile(r"\\boxed\s*\{")
_DECIMAL = re.compile(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+)(\.\d+)?|([+-]?)(\.\d+)")
_SCIENTIFIC = re.compile(r"([+-]?\d+(?:\.\d+)?)(?:[eE]|\\times10\^)\{?([+-]?\d{1,3})\}?")
_FRACTION = re.compile(r"([+-]?)(?:\\frac(?:\{(-?\d+)\}|(\d))(?:\{(\d+)\}|(\d))|(\d+)/(\d+))")
_VARIABLE = re.compile(r"([a-zA-Z](?:_\{?\w\}?)?)(?:=|\\in(?![A-Za-z]))(.+)")
_UNIT = re.compile(r"(.*?)\\(?:text|mathrm|mbox)\{([a-z ./]*)\}(?:\^\{?[23]\}?)?")
_TEXT = re.compile(r"\\(?:text|math[a-z]|mbox|hbox|operatorname)")
_COMMAND = re.compile(r"\\(?:begin|end)\{[a-z]+\*?\}|\\[A-Za-z]+")
_BASED = re.compile(r"\d_")
_SPACING = re.compile(r"\\[,;:! ]|\\q?quad\b|~|\s+")
_SPACE = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])|(?<=[A-Za-z]) (?=\d)|(?<=\d) (?=[A-Za-z])")
"""Spaces without meaning: not those between words, after a command, or between two numbers."""
_MULTIPLIERS = ("hundred", "thousand", "million", "billion", "trillion", "dozen", "percent", "score", "pair")


@dataclass(frozen=True)
class Symbolic:
    """Two normalised expressions whose equality is left to math-verify."""

    gold: str
    answer: str


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{…}`; None if there is none, or if it is not closed."""
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


def normalise(answer: str) -> str:
    """The same answer without spacing, sizing, dollar and degree signs; `\\dfrac`, `\\tfrac` become `\\frac`."""
    text = answer.strip().removesuffix(".")
    text = _SPACING.sub(" ", text)
    text = text.replace("\\$", "").replace("$", "").replace("{,}", ",")
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\^\{?\\circ\}?|\\degree\b", "", text)
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}").replace("−", "-")
    text = re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "", text)
    return _SPACE.sub("", text)


def judge(gold: str, answer: str) -> bool | Symbolic:
    """Whether the boxed `answer` equals the bare `gold`; Symbolic where only symbolic mathematics can tell."""
    if len(answer) > MAX_ANSWER_CHARS:
        return False
    gold = normalise(gold)
    answer = normalise(answer)
    if not gold or not answer:
        return False
    if gold == answer:
        return True
    if ("%" in gold) != ("%" in answer):
        return False

    variable, gold = _without_variable(gold.replace("\\%", "").replace("%", ""))
    other, answer = _without_variable(answer.replace("\\%", "").replace("%", ""))
    if variable and other and variable != other:
        return False

    gold = _without_unit(gold)
    if gold == answer:
        return True
    gold_number = literal(gold)
    if gold_number is not None:
        return _same_number(gold_number, answer)
    return _judge_symbolic(gold, answer)


def _same_number(gold: Fraction, answer: str) -> bool:
    """A literal equal to the gold; a fraction only in lowest terms, and not for a whole number."""
    value = literal(answer)
    fraction = _FRACTION.fullmatch(answer)
    if fraction is not None:
        digits = [group for group in fraction.groups()[1:] if group is not None]
        if gold.denominator == 1 or int(digits[1]) != gold.denominator:
            return False
    return value == gold


def literal(text: str) -> Fraction | None:
    """The value of a written-out number: integer, decimal, scientific or one fraction; None for anything to compute."""
    decimal = _DECIMAL.fullmatch(text)
    if decimal is not None:
        return Fraction(text.replace(",", ""))
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific is not None:
        return Fraction(scientific[1]) * Fraction(10) ** int(scientific[2])
    fraction = _FRACTION.fullmatch(text)
    if fraction is not None:
        above, below = (int(group) for group in fraction.groups()[1:] if group is not None)
        if below:
            return Fraction(-above if fraction[1] == "-" else above, below)
    return None


def _without_variable(text: str) -> tuple[str, str]:
    """`x=5` and `x\\in(1,3]` as (variable, value); the variable is empty where there is none to drop."""
    found = _VARIABLE.fullmatch(text)
    return (found[1], found[2]) if found is not None and "=" not in found[2] else ("", text)


def _without_unit(gold: str) -> str:
    """A gold number with a unit may be answered bare; an answer may not add what the gold does not have."""
    found = _UNIT.fullmatch(gold)
    if found is None or literal(found[1]) is None or any(word in found[2] for word in _MULTIPLIERS):
        return gold
    return found[1]


def _judge_symbolic(gold: str, answer: str) -> bool | Symbolic:
    if _wordy(gold) or _BASED.search(gold) or ":" in gold:
        return _plain_text(gold) == _plain_text(answer)
    if _wordy(answer) or _BASED.search(answer) or ":" in answer or ";" in answer:
        return False
    if answer.count("=") > gold.count("=") or _brackets(gold) != _brackets(answer):
        return False
    scientific = _SCIENTIFIC.fullmatch(answer)
    if scientific is not None:
        answer = f"{scientific[1]}\\times10^{{{scientific[2]}}}"
    return Symbolic(gold, answer)


def _wordy(text: str) -> bool:
    """Text commands, or a run of four letters outside of commands: words, which are no product of variables."""
    return _TEXT.search(text) is not None or re.search(r"[A-Za-z]{4,}", _COMMAND.sub(" ", text)) is not None


def _plain_text(text: str) -> str:
    """`\\text{(C)}`, `(C)` and `C` are the same choice; case matters."""
    bare = re.sub(r"\\(?:text\w*|mathrm|mathbf|mbox)\{([^{}]*)\}", r"\1", text)
    bare = re.sub(r"_\{(\w+)\}", r"_\1", bare).strip()
    choice = re.fullmatch(r"\(([A-Za-z])\)", bare)
    return choice[1] if choice is not None else " ".join(bare.split())


def _brackets(text: str) -> str:
    """What encloses a list: `()`, `(]`, …; the empty string for a set, a bare list, or no list at all."""
    if "," not in text or text.startswith("\\{"):
        return ""
    return text[0] + text[-1] if text[0] in "([" and text[-1] in ")]" else ""
