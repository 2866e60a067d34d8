"""What a game prints for a terminal, as plain text: the meaning of its colours stays, their codes go.

Games of toy text say where the player stands by nothing but a background colour: `FrozenLake` prints the same letters
wherever one is. A coloured background becomes `[x]`, coloured letters become `(red x)`.
"""

from __future__ import annotations

import re

_COLOURED = re.compile(r"\x1b\[([\d;]*)m([^\x1b]*)\x1b\[0?m")
_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def plain(text: str) -> str:
    """The text without terminal codes, without blank lines around it and spaces at the ends of lines."""
    marked = _COLOURED.sub(_mark, text)
    lines = (line.rstrip() for line in _CODE.sub("", marked).strip("\n").splitlines())
    return "\n".join(lines)


def _mark(found: re.Match[str]) -> str:
    codes = [int(code) for code in found[1].split(";") if code]
    inside = found[2]
    if any(40 <= code <= 47 or 100 <= code <= 107 for code in codes) or 7 in codes:
        return f"[{inside}]"
    colour = next((_COLOURS[code % 10] for code in codes if 30 <= code <= 37 or 90 <= code <= 97), None)
    return inside if colour is None else f"({colour} {inside})"
