"""LaTeX without what only changes its looks: spaces, sizes, fonts, dollar signs; and what names the answer's place."""

from __future__ import annotations

import re
from fractions import Fraction

_TABLE = r"""
− -   – -   ° ^\circ   π \pi   ∞ \infty   ≤ \le   ≥ \ge   ≠ \ne   × \times   · \cdot   ⋅ \cdot   ÷ \div   ∪ \cup
∅ \emptyset   ± \pm   ∓ \mp   ² ^2   ³ ^3   ½ \frac12   ¼ \frac14   ¾ \frac34
θ \theta   α \alpha   β \beta   ∈ \in   ℝ \mathbb{R}
"""
_UNICODE = dict(zip(_TABLE.split()[::2], (f"{latex} " for latex in _TABLE.split()[1::2]), strict=True))
_CURRENCIES = {
    **dict.fromkeys(("\\$", "$"), "dollar"),
    **dict.fromkeys(("€", "\\euro", "\\texteuro"), "euro"),
    **dict.fromkeys(("£", "\\pounds", "\\textsterling"), "sterling"),
    **dict.fromkeys(("¥", "\\yen", "\\textyen"), "yen"),
    **{"₹": "rupee", "¢": "cent"},
}
_SPACES = r"(?:\\[,;: ]|[\s~])*"
_SIGN = rf"(?:\\(?:text|mathrm|mbox)\s*\{{)?\s*({'|'.join(map(re.escape, _CURRENCIES))})\s*\}}?"
_COUNT = r"\.?\d(?:[\d.,]|\\[,!]|\{,\})*"
_AMOUNT = re.compile(rf"([-+]?)\s*{_SIGN}{_SPACES}([-+]?{_COUNT})\}}?|([-+]?{_COUNT}){_SPACES}{_SIGN}")
_DOTTED = re.compile(r"\\dot ?\{?(\d)\}?(?:(\d*)\\dot ?\{?(\d)\}?)?|((?:\d\u0305)+)")
_REPEATING = re.compile(
    r"(?<![\d.\x01])(?<!\d )(?<!\d,(?=\d{3}\.))(\d*)\.(\d*)"
    r"(?:\\(?:overline|bar) ?(?:\{ ?(\d+) ?\}|(\d))|(?<=\.)\((\d+)\))(?![\d.(])"
)
_STACKED = re.compile(
    r"(?<![A-Za-z\]}^_])\{ ?([-+]?\d+) ?\\over ?([-+]?\d+) ?\}|^\{?([-+]?\d+)\}? ?\\over ?\{?(\d+)\}?$"
)
_SHORT_ROOT = re.compile(r"√(?:\((\d+)\)|(\d+))")
_ARRAY = r"\\begin\{array\} ?\{[lcr ]*\}((?:(?!\\begin).)*?)\\end\{array\}"
_SAME = (
    (re.compile(r",\s*\\!\s*(?=\d{3})|\{,\}(?=\d{3}(?!\d))"), "\x01"),  # between groups of digits
    (re.compile(r"\\!"), ""),
    (re.compile(r"(?<!\\)\\[,;:> ]|\\q?quad\b|\\enspace\b|\\thinspace\b|~|\s+"), " "),
    (re.compile(r"\\(?:left|middle|right|displaystyle|textstyle|limits|[bB]igg?[lrm]?)(?![A-Za-z])"), ""),
    (re.compile(r"\\root ?(?:\{ ?(\w+) ?\}|(\w)) ?\\of(?![A-Za-z])"), r"\\sqrt[\1\2]"),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\\(?:leqslant|leq)(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\(?:geqslant|geq)(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne"),
    (re.compile(r"\\varnothing(?![A-Za-z])|\\\{ ?\\\}"), r"\\emptyset"),
    (re.compile(r"\\lbrace(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\mathbb ?(?:\{ ?R ?\}|R)|\\R(?![A-Za-z])"), r"(-\\infty,\\infty)"),
    (re.compile(r" ?\^ ?(?:\{ ?\\circ ?\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])"), "°"),
    (re.compile(r"\\(?:mathrm|text) ?\{ ?([eid]) ?\}"), r"\1"),
    (re.compile(r"\\(?:math(?:bf|it|sf|rm|normal)|text(?:bf|it|rm)?|boldsymbol|bm|mbox) ?\{ ?([-+\d.,/]+) ?\}"), r"\1"),
    (
        re.compile(r"(?<!\\)\( ?" + _ARRAY + r" ?\)|(?<!\\)\[ ?" + _ARRAY + r" ?\]"),
        r"\\begin{pmatrix}\1\2\\end{pmatrix}",
    ),
    (re.compile(r" ?\\(?:text|mathrm|mbox) ?\{ ?(?:percent|per cent) ?\}|(?<=\d) percent$|\\%"), "%"),
    (re.compile(r"^ ?([-+]) ?\{ ?([\d.]+) ?\}$"), r"\1\2"),
)
_JOINT = re.compile(r",? ?\\(?:text|mbox|mathrm) ?\{ ?(and|or) ?\}|(?<=\d),? (and|or) (?=[-\d])")
_RELATION = re.compile(r"[<>=]|\\(?:le|ge|ne)(?![A-Za-z])")
_OLD_FONT = re.compile(r"\{\s*\\(rm|bf|it|sf|tt)(?![A-Za-z])([^{}]*)\}")
_WRAPPED = tuple(map(re.compile, (r"\\\((.*)\\\)", r"\\\[(.*)\\\]", r"\$(.*)(?<!\\)\$", r"\{([^{}]*)\}")))
_BOLD = re.compile(r"\\(?:mathbf|boldsymbol|bm|mathit) ?\{((?:[^{}]|\{[^{}]*\})*)\}")
_THIN_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d ]*\d)")
_SPACE = re.compile(
    r"(?<![A-Za-z0-9,]) |(?<!,) (?![A-Za-z0-9\\])|(?<=[A-Za-z]) (?=\d)|(?<=[\d}]) (?=[A-Za-z])|(?<=[\w}]) (?=\\)"
)
"""Spaces without meaning: not those between words, after a command, between two numbers, or after a comma."""
_DOLLAR = re.compile(r"(?<=[\w.]) ?\\?\$ ?(?=[\w.])")
"""A sign of dollars between two characters, which without it would be one number."""
_MAY_GROUP = re.compile(r"\d, ?\d{3}(?!\d)")


def clean(text: str) -> str:
    """The same answer in its usual form. A comma that groups digits is a comma; a listing one may keep its space."""
    text = text.strip().removesuffix(".").strip()
    text = _SHORT_ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text)
    text = "".join(_UNICODE.get(each, each) for each in text)
    text = _OLD_FONT.sub(r"\\math\1{\2}", text.replace("\x01", "?"))

    for pattern in (*_WRAPPED, *_WRAPPED):  # one pair may stand around another
        found = pattern.fullmatch(text)
        text = found[1].strip() if found is not None else text
    text, unit = _amount(text)
    text = _DOLLAR.sub(" ", text).replace("\\$", "").replace("$", "").strip()
    for pattern, usual in _SAME:
        text = pattern.sub(usual, text)
    text = _listed(text)

    found = _BOLD.fullmatch(text.strip())
    text = found[1] if found is not None and re.search(r"\d", found[1]) else text
    text = _THIN_GROUPS.sub(lambda found: found[0].replace(" ", "\x01"), text)
    text = _SPACE.sub("", re.sub(" +", " ", text)).strip()
    text = _STACKED.sub(_fraction, _REPEATING.sub(_repeating, _DOTTED.sub(_overlined, text)))
    return (text if _MAY_GROUP.search(text) else text.replace(", ", ",")) + unit


def _listed(text: str) -> str:
    """With commas for the words `and` and `or`, but for an `or` between relations: that is another thing there."""
    related = _RELATION.search(text) is not None
    return _JOINT.sub(lambda found: "\\lor " if related and "or" in found.groups() else ", ", text)


def _amount(text: str) -> tuple[str, str]:
    """`\\$5`, `-\\text{€}5` and `5 €` as a number and its unit; an empty unit where the text is no amount of money."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        return text, ""
    minus, before, count, counted, after = found.groups()
    return counted or minus + count, f"\\text{{{_CURRENCIES[before or after]}}}"


def _overlined(found: re.Match[str]) -> str:
    """Digits that repeat, which have dots or a line above them, under one line."""
    return f"\\overline{{{re.sub('[^0-9]', '', found[0])}}}"


def _repeating(found: re.Match[str]) -> str:
    """A decimal with digits that repeat, as the fraction that it is."""
    whole, once, *repeated = found.groups()
    again = next(filter(None, repeated))
    difference = int(whole + once + again) - int(f"0{whole}{once}")
    value = Fraction(difference, 10 ** len(once) * (10 ** len(again) - 1))
    return str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _fraction(found: re.Match[str]) -> str:
    above, below = filter(None, found.groups())
    return f"\\frac{{{above}}}{{{below}}}"


def ungrouped(text: str, listing: bool) -> str:
    """Without the commas that group digits.

    In a listing `100,200` is two numbers. There a comma groups only if another one in it is followed by a space, or if
    a number cannot begin as the digits do (`1,000`).
    """
    text = text.replace("\x01", "")
    if listing and ", " not in text and not re.search(r"(?<![\d,])\d{1,3}(?:,\d{3})*,0\d\d(?!\d)", text):
        return text
    return re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d])", lambda found: found[0].replace(",", ""), text)
