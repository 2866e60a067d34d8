"""LaTeX without what only changes its looks: spaces, sizes, fonts, dollar signs; and what names the answer's place."""

from __future__ import annotations

import re

_UNICODE = {
    "−": "-", "–": "-", "°": "^\\circ ", "π": "\\pi ", "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ",
    "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "\\div ", "∪": "\\cup ", "∅": "\\emptyset ", "±": "\\pm ",
    "∓": "\\mp ", "²": "^2 ", "³": "^3 ", "½": "\\frac12 ", "¼": "\\frac14 ", "¾": "\\frac34 ", "θ": "\\theta ",
    "α": "\\alpha ", "β": "\\beta ", "∈": "\\in ", "ℝ": "\\mathbb{R}", "\u00a0": " ", "\u202f": " ", "\u2009": " ",
}  # fmt: skip
_SHORT_ROOT = re.compile(r"√(?:\((\d+)\)|(\d+))")
_SAME = (
    (re.compile(r",\s*\\!\s*(?=\d{3})|\{,\}(?=\d{3}(?!\d))"), "\x01"),  # between groups of digits
    (re.compile(r"\\!"), ""),
    (re.compile(r"(?<!\\)\\[,;:> ]|\\q?quad\b|\\enspace\b|\\thinspace\b|~|\s+"), " "),
    (re.compile(r"\\(?:left|right|displaystyle|textstyle|limits|[bB]igg?[lrm]?)(?![A-Za-z])"), ""),
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
    (re.compile(r"\\(?:text|mbox|mathrm) ?\{ ?(?:and|or) ?\}|(?<=\d) (?:and|or) (?=[-\d])"), ", "),
    (re.compile(r" ?\\(?:text|mathrm|mbox) ?\{ ?(?:percent|per cent) ?\}|(?<=\d) percent$|\\%"), "%"),
    (re.compile(r"^ ?([-+]) ?\{ ?([\d.]+) ?\}$"), r"\1\2"),
)
_WRAPPED = (re.compile(r"\\\((.*)\\\)"), re.compile(r"\\\[(.*)\\\]"), re.compile(r"\{([^{}]*)\}"))
_BOLD = re.compile(r"\\(?:mathbf|boldsymbol|bm|mathit) ?\{((?:[^{}]|\{[^{}]*\})*)\}")
_THIN_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d ]*\d)")
_SPACE = re.compile(r"(?<![A-Za-z0-9,]) |(?<!,) (?![A-Za-z0-9\\])|(?<=[A-Za-z]) (?=\d)|(?<=[\d}]) (?=[A-Za-z\\])")
"""Spaces without meaning: not those between words, after a command, between two numbers, or after a comma."""
_MAY_GROUP = re.compile(r"\d, ?\d{3}(?!\d)")


def clean(text: str) -> str:
    """The same answer in its usual form. A comma that groups digits is a comma; a listing one may keep its space."""
    text = text.strip().removesuffix(".").strip()
    text = _SHORT_ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text)
    text = "".join(_UNICODE.get(each, each) for each in text)
    text = text.replace("\x01", "?").replace("\\$", "").replace("$", "").strip()

    for pattern in _WRAPPED:
        found = pattern.fullmatch(text)
        text = found[1].strip() if found is not None else text
    for pattern, usual in _SAME:
        text = pattern.sub(usual, text)

    found = _BOLD.fullmatch(text.strip())
    text = found[1] if found is not None and re.search(r"\d", found[1]) else text
    text = _THIN_GROUPS.sub(lambda found: found[0].replace(" ", "\x01"), text)
    text = _SPACE.sub("", re.sub(" +", " ", text)).strip()
    return text if _MAY_GROUP.search(text) else text.replace(", ", ",")


def ungrouped(text: str, listing: bool) -> str:
    """Without the commas that group digits.

    In a listing `100,200` is two numbers. There a comma groups only if another one in it is followed by a space, or if
    a number cannot begin as the digits do (`1,000`).
    """
    text = text.replace("\x01", "")
    if listing and ", " not in text and not re.search(r"(?<![\d,])\d{1,3}(?:,\d{3})*,0\d\d(?!\d)", text):
        return text
    return re.sub(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d])", lambda found: found[0].replace(",", ""), text)
