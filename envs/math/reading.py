"""Reads one LaTeX expression exactly, as nested tuples; whatever has two readings, or none, is Unreadable.

Nodes are `("num", Fraction)`, `("sym", name)`, `("inf",)`, `("add" | "mul" | "div" | "pow", left, right)`,
`("neg", node)` and `("fn", name, *arguments)`. Nothing is dropped unread, and nothing is rounded. `1/2x`, `2^10`,
`\\sin x/2` and `2\\frac53` have two readings and are not read.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

Node = tuple[Any, ...]

MAX_DEPTH = 60
"""Of braces, brackets and signs in each other: the reader calls itself, and model output is hostile."""
GREEK = re.compile(
    r"alpha|beta|[gG]amma|[dD]elta|(?:var)?epsilon|zeta|eta|(?:var)?theta|Theta|iota|kappa|[lL]ambda|mu|nu|[xX]i|Pi|rho|"
    r"[sS]igma|tau|[uU]psilon|(?:var)?phi|Phi|chi|[pP]si|[oO]mega|pi|ell"
)
_FUNCTION = re.compile(r"(?:arc)?(?:sin|cos|tan)|(?:sin|cos|tan)h|cot|sec|csc|ln|log|lg|exp")
_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_CALLED = re.compile(r"\s*\(\s*(?:\d+(?:\.\d+)?|[A-Za-z]|\\[A-Za-z]+)\s*\)")
_DERIVATIVE = re.compile(r"\s*\{\s*(d|\\partial|\\Delta)(?![+\-*/^])[^{}]*\}\s*\{\s*\1\s*\\?[A-Za-z]")
_MIXED = re.compile(r"\s*\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))")
_IN_BRACKETS = re.compile(r"\s*\(\d+\)")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_TIMES = re.compile(r"\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|\*")
_OVER = re.compile(r"\\div(?![A-Za-z])|/")
_SUBSCRIPT = re.compile(r"_(?:\{([A-Za-z0-9,+-]+)\}|([A-Za-z0-9]))")
_APPLIED = "fghFGHPQ"
"""Letters that before a bracket name a function: `f(x)` is no product."""
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_FENCES = {"lfloor": ("floor", "\\rfloor"), "lceil": ("ceil", "\\rceil"), "lvert": ("abs", "\\rvert")}
_STACK = re.compile(r"\\(over|choose)(?![A-Za-z])")
_ENDS = {"over", "choose", *(closing[1:] for _, closing in _FENCES.values())}


class Unreadable(ValueError):
    """Not an expression that has exactly one reading."""


def read(text: str) -> Node:
    """The expression that `text` is. Raises Unreadable."""
    if not text.replace("°", "").isascii():
        raise Unreadable(text)
    reader = _Reader(text)
    node = reader.stacked()
    if reader.peek():
        raise Unreadable(text)
    return node


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.bars = 0

    def peek(self) -> str:
        """The next character that is no space; the empty string at the end."""
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.peek()
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def expect(self, closing: str) -> None:
        self.peek()
        if not self.text.startswith(closing, self.at):
            raise Unreadable(self.text)
        self.at += len(closing)

    def stacked(self) -> Node:
        """A sum, or one over another in plain TeX: `a \\over b`, `n \\choose k`."""
        node = self.sum()
        found = self.take(_STACK)
        if found is None:
            return node
        return ("div", node, self.sum()) if found[1] == "over" else ("fn", "binomial", node, self.sum())

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")

        node = self.signed()
        while (sign := self.peek()) in ("+", "-") and sign:
            self.at += 1
            term = self.product()
            node = ("add", node, term if sign == "+" else ("neg", term))

        self.depth -= 1
        return node

    def signed(self) -> Node:
        """A product behind at most one sign."""
        sign = self.peek()
        if sign in ("+", "-") and sign:
            self.at += 1
        node = self.product()
        return ("neg", node) if sign == "-" else node

    def product(self) -> Node:
        """Factors side by side, with signs of multiplication, or over one another."""
        node = self.power()
        divided = False

        while self.peek():
            if self.take(_TIMES):
                node = ("mul", node, self.factor())
                divided = False

            elif self.take(_OVER):
                if divided:
                    raise Unreadable("one division after another")
                node = ("div", node, self.factor())
                divided = True

            elif self.starts_factor():
                number = self.peek().isdigit() or self.peek() == "."
                if divided or (number and not self.text[: self.at].rstrip().endswith("!")):
                    raise Unreadable("1/2x, or a number after another factor")
                node = ("mul", node, self.power())
            else:
                break
        return node

    def factor(self) -> Node:
        """What follows a sign of multiplication or division, which may have a minus sign."""
        if self.peek() == "-":
            self.at += 1
            return ("neg", self.power())
        return self.power()

    def starts_factor(self) -> bool:
        next_one = self.peek()
        if next_one == "\\":
            found = _COMMAND.match(self.text, self.at)
            return found is not None and found[1] not in _ENDS
        return next_one.isalnum() or (next_one == "|" and not self.bars) or (bool(next_one) and next_one in "({[")

    def power(self) -> Node:
        function = _COMMAND.match(self.text, self.at) if self.peek() == "\\" else None
        if function is not None and _FUNCTION.fullmatch(function[1]):
            self.at = function.end()
            return self.function(function[1])

        node = self.atom()
        raised = False
        while (mark := self.peek()) in ("^", "!", "°") and mark:
            if raised or (mark == "!" and node[:2] == ("fn", "factorial")):
                raise Unreadable("a power of a power without braces")

            self.at += 1
            if mark == "^":
                node = ("pow", node, self.argument())
                raised = True
            elif mark == "!":
                node = ("fn", "factorial", node)
            else:
                node = ("fn", "degree", node)
        return node

    def argument(self) -> Node:
        """What a command or a power takes: a group, or one character."""
        first = self.peek()
        if first == "{":
            return self.group("{")
        if first.isdigit():
            self.at += 1
            if self.text[self.at : self.at + 1] == ".":
                raise Unreadable(self.text)
            return ("num", Fraction(int(first)))
        if first.isalpha():
            self.at += 1
            return ("sym", first)

        found = self.take(_COMMAND)
        if found is None or not GREEK.fullmatch(found[1]):
            raise Unreadable(self.text)
        return ("sym", f"\\{found[1]}")

    def group(self, opening: str) -> Node:
        self.expect(opening)
        node = self.stacked()
        self.expect(_CLOSING[opening])
        return node

    def atom(self) -> Node:
        first = self.peek()
        if first.isdigit() or first == ".":
            return self.number()
        if first and first in "({[":
            return self.group(first)

        if first == "|":
            self.at += 1
            self.bars += 1
            node = self.sum()
            self.bars -= 1
            self.expect("|")
            return ("fn", "abs", node)
        if first.isalpha():
            self.at += 1
            return self.named(first)

        found = self.take(_COMMAND)
        if found is None:
            raise Unreadable(self.text)
        return self.command(found[1])

    def number(self) -> Node:
        found = self.take(_NUMBER)
        if found is None:
            raise Unreadable(self.text)

        if "." in found[0] and _IN_BRACKETS.match(self.text, self.at):
            raise Unreadable("a decimal that repeats, or a product")
        mixed = _MIXED.match(self.text, self.at) if "." not in found[0] else None
        if mixed is None:
            return ("num", Fraction(found[0]))
        self.at = mixed.end()
        above, below = (int(group) for group in mixed.groups() if group is not None)
        if not 0 < above < below or found[0] == "0":
            raise Unreadable("neither a mixed number nor a product")
        return ("num", int(found[0]) + Fraction(above, below))

    def named(self, name: str) -> Node:
        subscript = _SUBSCRIPT.match(self.text, self.at)
        if subscript is not None:
            self.at = subscript.end()
            name = f"{name}_{subscript[1] or subscript[2]}"
        if name[0] not in _APPLIED and _CALLED.match(self.text, self.at):
            raise Unreadable("a function or a product")
        if name[0] in _APPLIED and self.peek() == "(":
            return ("fn", f"apply {name}", self.group("("))
        return ("sym", name)

    def command(self, name: str) -> Node:
        if name == "frac":
            if _DERIVATIVE.match(self.text, self.at):
                raise Unreadable("a derivative, or a quotient of products")
            above = self.argument()
            return ("div", above, self.argument())
        if name == "binom":
            above = self.argument()
            return ("fn", "binomial", above, self.argument())
        if name == "sqrt":
            return self.root()
        if name == "infty":
            return ("inf",)

        if name in _FENCES:
            function, closing = _FENCES[name]
            node = self.sum()
            self.expect(closing)
            return ("fn", function, node)
        if not GREEK.fullmatch(name):
            raise Unreadable(f"\\{name}")
        return self.named(f"\\{name}")

    def root(self) -> Node:
        if self.peek() != "[":
            return ("fn", "root", self.argument(), ("num", Fraction(2)))
        degree = self.group("[")
        return ("fn", "root", self.argument(), degree)

    def function(self, name: str) -> Node:
        """`\\sin x`, `\\sin^2(x)`, `\\log_2 8`; what follows a bracket, or a bracket that follows, is not read."""
        base: tuple[Node, ...] = ()
        if name == "log" and self.peek() == "_":
            self.at += 1
            base = (self.argument(),)
        exponent = None
        if self.peek() == "^":
            self.at += 1
            exponent = self.argument()
            if exponent[0] != "num":
                raise Unreadable("an inverse function, or a power of one")

        if self.peek() and self.peek() in "({[|":
            inner = self.atom()
            if self.peek() and self.peek() in "^!°":
                raise Unreadable("a power of a function or of its argument")
        else:
            inner = self.bare_argument()
        node = ("fn", name, inner, *base)
        return node if exponent is None else ("pow", node, exponent)

    def bare_argument(self) -> Node:
        inner = self.power()
        while self.starts_factor():
            found = _COMMAND.match(self.text, self.at)
            if found is not None and (_FUNCTION.fullmatch(found[1]) or found[1] in ("cdot", "times", "div")):
                break
            if self.peek() in "({[" or self.peek().isdigit():
                raise Unreadable("where the argument of a function ends")
            inner = ("mul", inner, self.power())

        if self.peek() == "/":
            raise Unreadable("where the argument of a function ends")
        return inner
