"""The one type that every source of maths problems produces."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """A question and its gold answer: the bare value (`42`, `\\frac{1}{2}`), without box or solution."""

    question: str
    answer: str
    asked: str = field(default="", kw_only=True)
    """What the data say of the answer's type, as in `answers.typed`; empty: the answer shows it."""
