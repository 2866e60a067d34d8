"""From LaTeX to a `Value`: which type an answer has, and what it says in that type."""

from __future__ import annotations

import re
from typing import get_args

from envs.math.cleaning import ungrouped
from envs.math.reading import Unreadable, read
from envs.math.units import unit
from envs.math.values import Kind, Listing, Value, literal

OR = "\\lor"
LISTINGS: tuple[Kind, ...] = get_args(Listing)
_ASSIGNED = re.compile(
    r"([a-zA-Z](?:_\{?\w\}?)?(?:\^\{-1\}(?= ?\())?(?: ?\([a-z](?:,[a-z])*\))?|\\[a-z]+) ?(?:=|\\in(?![A-Za-z])) ?(.+)"
)
_RELATION = re.compile(r"\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|[<>=]")
_TURNED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_MATRIX = re.compile(r"\\begin\{([pb])matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_BUILT = re.compile(r"([A-Za-z]) ?(?:\\(?:mid|vert)(?![A-Za-z])|[|:]) ?(.+)")
"""A set of all that fulfils a condition: `x|x>2`."""
_SIGNS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_JOINED = re.compile(r"\d+(?:[-+/:.]\d+)+")
"""Scores, dates, sums: numbers that would have to be worked out."""
_WORD = re.compile(r"[A-Za-z]{4}|[A-Z]{2}|[A-Z][a-z]{2}|[a-z]*([a-z])[a-z]?\1|(?=[a-z]{3})[a-z]*[eiou]")
_LETTERS = re.compile(r"[A-Za-z ]{2,}")
_SPOKEN = re.compile(r"(?=.*(?:[A-Za-z][eiou]|[eiou][A-Za-z]))[A-Za-z ]+", re.IGNORECASE)
"""Words of two letters, where nothing else stands: `no`, `a to b`. Elsewhere they are products, as in `a+bi`."""
_COMMAND = re.compile(r"\\[A-Za-z]+")
_UNIT_STARTS = re.compile(r"\\(?:text|mathrm|mbox|operatorname|frac ?\{ ?\\(?:text|mathrm))|°")
_BARE_UNIT = re.compile(r"([-+]?[\d.,]+) ?([A-Za-z]{2}[A-Za-z /^\d]*)")
_PLAIN = re.compile(r"\\(?:text\w*|math(?:rm|bf|sf|it|tt)|mbox|hbox) ?\{([^{}]*)\}")
_CHOICE = re.compile(r"\(?([A-Za-z])[.)]?\)?\.?")


def value_of(text: str, wanted: Kind | None = None, gold: bool = False) -> Value:
    """What a clean text says: read in the type `wanted`, or in its own. What is not understood is a text."""
    listing = wanted in LISTINGS or (wanted is None and (", " in text or text[:1] in "([\\"))
    text = ungrouped(text, (listing and literal(text) is None) or wanted in LISTINGS)
    value = _value(text, gold)

    if value.kind == "list" and wanted == "ordered list":
        return Value("ordered list", value.parts, mark=value.mark)
    if value.kind == "tuple" and wanted == "interval" and len(value.parts) == 2:
        return Value("interval", value.parts, mark=value.mark)
    return Value("text", text=plain(text)) if wanted == "text" else value


def assigned(text: str) -> tuple[str, str]:
    """`x=5`, `x\\in(1,3]` and `x=1, x=2` as (name, what it is); an empty name where there is none, or several."""
    items = [item for way in split(text, OR) for item in split(way, ",")]
    found = [_ASSIGNED.fullmatch(each.strip()) for each in items]
    first = found[0]
    if first is None or any(each is not None and each[1] != first[1] for each in found):
        return "", text

    values = [each[2] if each is not None else item for each, item in zip(found, items, strict=True)]
    if any(_RELATION.search(each) for each in values):
        return "", text
    separator = ", " if ", " in text or OR in text else ","
    return first[1].replace("{", "").replace("}", "").replace(" ", ""), separator.join(values)


def choice(text: str) -> str:
    """The letter of `A`, `(A)`, `\\textbf{(A) }`, …; the empty string for anything else."""
    bare = _PLAIN.sub(r"\1", text).strip("{} ")
    found = _CHOICE.fullmatch(re.sub(r"\s", "", bare))
    return found[1] if found is not None else ""


def plain(text: str) -> str:
    """Without text commands; a capital that begins a word, and is its only one, does not matter."""
    bare = re.sub(r"_\{(\w+)\}", r"_\1", _PLAIN.sub(r" \1 ", text)).replace(", ", ",")
    bare = re.sub(r"\\sqrt ?(\w)", r"\\sqrt{\1}", bare)
    words = re.sub(r"(?<=\d)(?=[A-Za-z])", " ", bare).split()
    small = (each.lower() if re.fullmatch(r"[A-Z][a-z]{2,}|No", each) else each for each in words)
    return choice(text) or " ".join(small)


def split(text: str, separator: str) -> list[str]:
    """At a separator that stands in no brackets, braces or environment."""
    parts = [""]
    depth = at = 0
    while at < len(text):
        if depth == 0 and text.startswith(separator, at):
            parts.append("")
            at += len(separator)
            continue

        escaped = text[at : at + 2] if text[at] == "\\" else text[at]
        opens = escaped in ("(", "[", "{", "\\{") or text.startswith(("\\begin{", "\\langle"), at)
        closes = escaped in (")", "]", "}", "\\}") or text.startswith(("\\end{", "\\rangle"), at)
        depth += opens - closes
        parts[-1] += escaped
        at += len(escaped)
    return parts


def _value(text: str, gold: bool = False) -> Value:
    text = text.strip()
    matrix = _MATRIX.fullmatch(text)
    if matrix is not None:
        return _matrix(matrix[2])
    ways = split(text, OR)
    if len(ways) > 1:
        return Value("list", tuple(map(_value, ways)), mark=OR)
    items = _alternatives(text)
    if len(items) > 1:
        return Value("list", tuple(map(_value, items)))

    unions = split(text, "\\cup")
    if len(unions) > 1:
        return Value("union", tuple(map(_value, unions)))
    if text == "\\emptyset":
        return Value("set")
    enclosed = _enclosed(text)
    if enclosed is not None:
        return enclosed
    if text.endswith("%"):
        return Value("percentage", (_value(text[:-1], gold),))
    return _relation(text) or _quantity(text) or _leaf(text, gold)


def _alternatives(text: str) -> list[str]:
    """Members of a bare list; one with a single sign of plus or minus is two."""
    members = []
    for each in split(text, ","):
        signs = [found[1] for found in _SIGNS.finditer(each)]
        if signs.count("pm") != 1:
            members.append(each)
            continue
        for upper, lower in (("+", "-"), ("-", "+")):
            turned = each.replace("\\pm", f" {upper}").replace("\\mp", f" {lower}").strip()
            members.append(turned.replace(" ", "", 1) if turned.startswith(("+ ", "- ")) else turned)
    return members


def _matrix(body: str) -> Value:
    rows = [row.strip() for row in body.split("\\\\") if row.strip()]
    return Value("matrix", tuple(Value("tuple", tuple(map(_value, row.split("&"))), mark="row") for row in rows))


def _enclosed(text: str) -> Value | None:
    """A set, a tuple or an interval that the whole text is."""
    if text.startswith("\\{") and text.endswith("\\}") and len(split(text[:-2], "\\}")) == 1:
        inner = text[2:-2]
        if not _balanced(inner):
            return None

        built = _BUILT.fullmatch(inner)
        if built is not None:
            return Value("set", (_value(built[2]),), mark=f"{built[1]}|")
        return Value("set", tuple(map(_value, _alternatives(inner))))
    if text.startswith("\\langle") and text.endswith("\\rangle"):
        inner = text[len("\\langle") : -len("\\rangle")]
        return Value("tuple", tuple(map(_value, split(inner, ","))), mark="<>")
    if text[:1] not in ("(", "[") or text[-1:] not in (")", "]") or not _balanced(text[1:-1]):
        return None

    parts = split(text[1:-1], ",")
    if len(parts) == 1 or any(_SIGNS.search(each) for each in parts):
        return None
    mark = text[0] + text[-1]
    closed = mark != "()" or any("\\infty" in each for each in parts)
    return Value("interval" if closed and len(parts) == 2 else "tuple", tuple(map(_value, parts)), mark=mark)


def _balanced(text: str) -> bool:
    """Whether no bracket is closed that was not opened in it."""
    depth = 0
    for each in re.finditer(r"\\?[()\[\]{}]", text):
        depth += 1 if each[0][-1] in "([{" else -1
        if depth < 0:
            return False
    return depth == 0


def _relation(text: str) -> Value | None:
    relations = _RELATION.findall(text)
    if not relations:
        return None
    sides = [_leaf(each.strip()) for each in _RELATION.split(text)]
    if any(side.kind == "text" for side in sides):
        return None
    if relations in (["="], ["\\ne"]):
        return Value("equation" if relations == ["="] else "inequality", tuple(sides), mark=relations[0])

    if all(each in (">", "\\ge") for each in relations):
        relations = [_TURNED[each] for each in reversed(relations)]
        sides.reverse()
    known = all(each in ("<", "\\le") for each in relations)
    return Value("inequality", tuple(sides), mark=" ".join(relations)) if known else None


def _quantity(text: str) -> Value | None:
    """A value in front of a unit that is known; without `\\text` only behind a written-out number."""
    bare = _BARE_UNIT.fullmatch(text)
    if bare is not None and literal(bare[1]) is not None:
        known = unit(bare[2])
        return None if known is None else Value("unit", (_leaf(bare[1]),), mark=str(known))

    for start in _UNIT_STARTS.finditer(text):
        head = text[: start.start()].strip()
        known = unit(text[start.start() :])
        number = _leaf(head, gold=True)
        if known is not None and (number.kind == "number" or (number.kind == "expression" and start[0] != "°")):
            return Value("unit", (_leaf(head),), mark=str(known))
    return None


def _leaf(text: str, gold: bool = False) -> Value:
    number = literal(text, restated=gold)
    if number is not None:
        return Value("number", node=("num", number))
    if _JOINED.fullmatch(text) or _SPOKEN.fullmatch(text) or _WORD.search(_COMMAND.sub(" ", text)):
        return Value("text", text=plain(text))
    try:
        letters = text.replace(" ", "") if _LETTERS.fullmatch(text) else ""
        return Value("expression", node=read(text), text=letters)
    except Unreadable:
        return Value("text", text=plain(text))
