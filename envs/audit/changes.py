"""Certainly wrong and certainly equal variants of one answer, made from its text without the verifier.

Each is certain by construction: a value is changed as an exact fraction, a member is left out, a relation is turned.
What is not understood here is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction

Variant = tuple[str, bool, str]
"""(what was done, whether it is still right, the text)"""

NEAR = Fraction(1, 10**9)
_INTEGER = re.compile(r"-?\d+")
_DECIMAL = re.compile(r"-?\d+\.\d+")
_FRACTION = re.compile(r"(-?)\\[dtc]?frac\{(-?\d+)\}\{(\d+)\}|(-?)(\d+)/(\d+)")
_SCIENTIFIC = re.compile(r"(-?\d+(?:\.\d+)?) ?(\\times|\\cdot) ?10\^\{?(-?\d+)\}?")
_ZERO = re.compile(r"(?<![\d.])0(?![\d.])")
_GROUPS = re.compile(r"\d,\d{3}(?!\d)")
_POWER = re.compile(r"([A-Za-z2-9]|(?<![\d.])10)\^(?:\{(-?\d{1,4})\}|(\d))")
_UNIT = re.compile(r"(-?[\d.]+)(\\?[,;~ ]*\\(?:text|mathrm|mbox)\{[^{}]*\}(?:\^\{?\d\}?)?)")
_CELL = re.compile(r"(?<![\w.{}/+^-])-?\d+(?= *(?:&|\\\\))")
_CHOICE = re.compile(r"((?:\\(?:text|math)[a-z]*\{)?\(?)([A-E])([.)]{0,2}\}?)")
_NAMED = re.compile(r"([A-Za-z]\w*(?:_\{\w+\})?(?:\([a-z]\))? ?= ?)([^=,<>]+)")
_SIZED = re.compile(r"\\(?:left|right)(?![A-Za-z]) ?(?!\.)")
_TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "\\leq": "\\geq", "\\geq": "\\leq"}
_RELATION = re.compile(r"\\[lg]eq?(?![A-Za-z])|[<>]")
_BRACKETS = {"(": "[", "[": "(", ")": "]", "]": ")"}


def value_of(text: str) -> Fraction | None:
    """The value of a plain number: an integer, a decimal, or one fraction."""
    text = text.strip()
    if _INTEGER.fullmatch(text) or _DECIMAL.fullmatch(text):
        return Fraction(text)
    found = _FRACTION.fullmatch(text)
    if found is None:
        return None
    sign, above, below = (found[1], found[2], found[3]) if found[3] else (found[4], found[5], found[6])
    return Fraction(int(above), int(below)) * (-1 if sign else 1) if int(below) else None


def written(value: Fraction, decimal: bool = False) -> str:
    """A number in lowest terms, or as a decimal where it is one."""
    if value.denominator == 1:
        return str(value.numerator)
    if decimal:
        digits = next(count for count in range(1, 60) if (10**count) % value.denominator == 0)
        scaled = abs(value.numerator) * 10**digits // value.denominator
        whole = str(scaled).rjust(digits + 1, "0")
        return f"{'-' if value < 0 else ''}{whole[:-digits]}.{whole[-digits:]}"
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def of_number(text: str) -> Iterator[Variant]:
    """Of a plain number, or of one in scientific notation."""
    scientific = _SCIENTIFIC.fullmatch(text)
    if scientific is not None and Fraction(scientific[1]):
        head, times, exponent = scientific.groups()
        for step in (1, -1):
            yield f"exponent {step:+d}", False, f"{head}{times} 10^{{{int(exponent) + step}}}"
        yield "sign", False, f"-{text}".removeprefix("--")

    value = value_of(text)
    if value is None:
        return

    decimal = _FRACTION.fullmatch(text) is None
    if value:
        yield "sign", False, written(-value, decimal)
        yield "exponent +1", False, written(value * 10, decimal)
        yield "exponent -1", False, written(value / 10, decimal)

    turned = text.strip()[::-1]
    if _INTEGER.fullmatch(turned) and int(turned) != value:
        yield "digits in another order", False, str(int(turned))
    yield "one more", False, written(value + 1, decimal)
    yield "next to it", False, written(value + NEAR, decimal)

    if decimal:
        yield "another spelling", True, f"{text}0" if "." in text else f"{text}.0"
    else:
        above, below = abs(value.numerator), value.denominator
        sign = "-" if value < 0 else ""
        yield "upside down", False, written(1 / value) if value and value**2 != 1 else written(value + 2)
        if below > 1:
            yield "another spelling", True, f"{sign}\\dfrac{{{above}}}{{{below}}}"
            yield "an equal fraction", True, f"\\frac{{{sign}{above}}}{{{below}}}"


def more(text: str) -> str:
    """One more than a number or an expression."""
    value = value_of(text)
    return f"{text}+1" if value is None else written(value + 1, _FRACTION.fullmatch(text.strip()) is None)


def members_of(text: str) -> list[str]:
    """What stands between commas that are in no brackets."""
    parts = [""]
    depth = 0
    for each in text:
        depth += (each in "([{") - (each in ")]}")
        if each == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += each
    return [part.strip() for part in parts]


def enclosed(text: str) -> tuple[str, str, str]:
    """(the bracket that encloses the whole text, what it holds, the bracket that closes it); empty where there is
    none."""
    opening = next((each for each in ("\\{", "\\left(", "(", "[") if text.startswith(each)), "")
    closing = next((each for each in ("\\}", "\\right)", ")", "]") if opening and text.endswith(each)), "")
    inner = text[len(opening) : len(text) - len(closing)]
    depth = 0
    for each in inner:
        depth += (each in "([{") - (each in ")]}")
        if depth < 0:  # it is closed before the end
            return "", text, ""
    return (opening, inner, closing) if closing else ("", text, "")


def of_members(text: str, ordered: bool) -> Iterator[Variant]:
    """Of values between commas, in brackets or without; `ordered`: their order counts, as brackets do."""
    opening, inner, closing = enclosed(text)
    members = members_of(inner)
    unclear = any(each in text for each in ("\\pm", "=", "brace", "\\in ", "and", "or"))
    in_groups = ", " in text and _GROUPS.search(text) is not None  # of digits, which are joined by what is wide apart
    if len(members) < 2 or not all(members) or unclear or in_groups:
        return

    def joined(each: list[str]) -> str:
        return f"{opening}{', '.join(each)}{closing}"

    last = members[-1]
    yield "a dropped member", False, joined(members[:-1])
    yield "a doubled member", False, joined([*members, last])
    if "infty" not in last:
        yield "another member", False, joined([*members[:-1], more(last)])

    values = [value_of(each) for each in members]
    if not ordered:
        yield "another order", True, joined(members[::-1])
    elif None not in values and values != values[::-1]:
        yield "another order", False, joined(members[::-1])
    yield "spacing", True, joined(members)


def of_interval(text: str) -> Iterator[Variant]:
    """Another bracket, an end that lies elsewhere, and what holds of all members in their order."""
    if text[:1] in _BRACKETS and text[-1:] in _BRACKETS and "," in text:
        left, right = text[1:-1].split(",")[0], text[1:-1].split(",")[-1]
        if "infty" not in left:
            yield "another bracket", False, _BRACKETS[text[0]] + text[1:]
        if "infty" not in right:
            yield "another bracket", False, text[:-1] + _BRACKETS[text[-1]]
    for what, equal, changed in of_members(text, ordered=True):
        if what == "another member" or equal:
            yield what, equal, changed


def of_union(text: str) -> Iterator[Variant]:
    if "\\in" in text.replace("\\infty", ""):
        return
    parts = [part.strip() for part in text.split("\\cup")]
    if len(parts) > 1:
        yield "a dropped part", False, "\\cup".join(parts[:-1])
        yield "another order", True, " \\cup ".join(parts[::-1])
        others = "\\cup".join(parts[:-1])
        ends = [each for each in members_of(parts[-1][1:-1]) if "infty" not in each]
        if not any(end in others for end in ends):  # else another part may hold the end
            yield from (
                (what, equal, f"{others}\\cup{changed}") for what, equal, changed in of_interval(parts[-1]) if not equal
            )


def of_matrix(text: str) -> Iterator[Variant]:
    cell = _CELL.search(text)
    if cell is not None:
        yield "another member", False, f"{text[: cell.start()]}{int(cell[0]) + 1}{text[cell.end() :]}"


def of_inequality(text: str) -> Iterator[Variant]:
    relations = _RELATION.findall(text)
    if not relations or "\\ne" in text:
        return
    yield "the other inequality", False, _RELATION.sub(lambda found: f"{_TURNED[found[0]]} ", text)
    strict = relations[0] in "<>"
    other = {"<": "\\le ", ">": "\\ge "}.get(relations[0], "<" if "l" in relations[0] else ">")
    yield "with its end" if strict else "without its end", False, text.replace(relations[0], other, 1)


def of_expression(text: str) -> Iterator[Variant]:
    """An expression and one more are never equal, nor is one with another exponent of a letter."""
    if "\\pm" in text or "infty" in text or "=" in text:
        return
    yield "one more", False, f"{text}+1"
    found = _POWER.search(text)
    if found is not None and _ZERO.search(text) is None:
        exponent = int(found[2] or found[3])
        yield "exponent +1", False, f"{text[: found.start()]}{found[1]}^{{{exponent + 1}}}{text[found.end() :]}"
    if "\\frac{" in text:
        yield "another spelling", True, text.replace("\\frac{", "\\dfrac{")


def of_equation(text: str) -> Iterator[Variant]:
    """Two sides, of which one is made one more."""
    left, separator, right = text.partition("=")
    if separator and "=" not in right and not any(each in text for each in ("\\pm", "infty", "\\ne", ",")):
        yield "one more", False, f"{left}={right}+1"
        yield "its sides swapped", True, f"{right.strip()}={left.strip()}"


def of_unit(text: str) -> Iterator[Variant]:
    found = _UNIT.fullmatch(text)
    if value_of(text):
        yield from of_number(text)
    if found is None or not value_of(found[1]):
        return
    number, unit = found.groups()
    yield "another unit", False, number + ("\\text{ cm}" if "kg" in unit or "kilo" in unit else "\\text{ kg}")
    yield "without its unit", True, number
    for what, equal, changed in of_number(number):
        yield what, equal, changed + unit


def of_percentage(text: str) -> Iterator[Variant]:
    number = text.removesuffix("%").removesuffix("\\").strip()
    if value_of(number):
        yield "without its percent sign", False, number
        for what, equal, changed in of_number(number):
            yield what, equal, f"{changed}\\%"


def of_text(text: str) -> Iterator[Variant]:
    letter = _CHOICE.fullmatch(text)
    if letter is not None:
        yield "another choice", False, f"{letter[1]}{'ABCDE'['EABCD'.index(letter[2])]}{letter[3]}"
    else:
        yield "its opposite", False, f"\\text{{not }}{text}"


_OF: dict[str, Callable[[str], Iterator[Variant]]] = {
    "number": of_number,
    "percentage": of_percentage,
    "unit": of_unit,
    "interval": of_interval,
    "inequality": of_inequality,
    "expression": of_expression,
    "equation": of_equation,
    "union": of_union,
    "matrix": of_matrix,
    "text": of_text,
    "list": lambda text: of_members(text, ordered=False),
    "set": lambda text: of_members(text, ordered=False),
    "tuple": lambda text: of_members(text, ordered=True),
    "ordered list": lambda text: of_members(text, ordered=True),
}


def of_latex(text: str, kind: str, gold: str = "") -> list[Variant]:
    """Variants of an answer of this type, as `envs.math.values.Kind` names them, each text once.

    Where the answer's own notation is not understood here, wrong ones are made of the gold answer, which equals it.
    """
    text = text.strip()
    made = _made(text, kind)
    if gold and all(equal for _, equal, _ in made):
        made += [variant for variant in _made(gold.strip(), kind) if not variant[1]]
    if "$" not in text and not text.endswith("."):
        made += [("spacing", True, f" {text} "), ("spacing", True, f"${text}$")]
    found = {text: ("", True, text)}
    for variant in made:
        found.setdefault(variant[2], variant)
    return list(found.values())[1:]


def _made(text: str, kind: str) -> list[Variant]:
    """Of a text without what changes its looks only, or a name that stands before the value."""
    if kind not in _OF:
        return []
    text = _SIZED.sub("", text)
    if _CHOICE.fullmatch(text):  # as an expression, a letter is no other one either
        return list(of_text(text))
    named = _NAMED.fullmatch(text) if kind not in ("equation", "text") else None
    if named is None:
        return list(_OF[kind](text))
    return [(what, equal, f"{named[1]}{changed}") for what, equal, changed in _OF[kind](named[2].strip())]


def of_plain(text: str) -> list[Variant]:
    """Variants of an answer that is compared as a text: white space around it does not matter."""
    spaced = ("spacing", True, f"\n {text} ")
    value = value_of(text)
    if value is None:
        return [spaced, ("a letter more", False, f"{text}x")]
    decimal = _FRACTION.fullmatch(text.strip()) is None
    others = [("one more", value + 1), ("exponent +1", value * 10), ("sign", -value)]
    return [spaced, *((what, False, written(each, decimal)) for what, each in others if each != value)]
