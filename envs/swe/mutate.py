"""Bugs by syntax-tree mutation: one small edit of the text, the rest of the file byte for byte as it was."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_MEMBER = {"in": "not in", "not in": "in", "is": "is not", "is not": "is"}
_OPERATORS = {
    "compare": _COMPARE | _MEMBER,
    "arithmetic": {"+": "-", "-": "+", "*": "+", "//": "*", "%": "//", "/": "*"},
    "boolean": {"and": "or", "or": "and"},
}
Edit = tuple[str, int, int, str]
"""(kind, start, end, text) of a `Mutation`."""


@dataclass(frozen=True)
class Mutation:
    """Replace bytes [start, end) of the file by `text`."""

    kind: str
    """compare, arithmetic, negate-if, swap-return, boolean, off-by-one, argument-order"""
    function: str
    """Dotted name of the function it is in."""
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutations(source: bytes) -> Iterator[Mutation]:
    """All mutations inside functions, in the order of the tree. Raises SyntaxError."""
    yield from _Finder(source).below(ast.parse(source), "", inside=False)


class _Finder:
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._starts = [0]
        for line in source.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def below(self, node: ast.AST, name: str, *, inside: bool) -> Iterator[Mutation]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                below = f"{name}.{child.name}" if name else child.name
                yield from self.below(child, below, inside=inside or not isinstance(child, ast.ClassDef))
                continue
            if inside:
                for kind, start, end, text in self._of(child):
                    yield Mutation(kind, name, start, end, text)
            yield from self.below(child, name, inside=inside)

    def _of(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.Compare(left, [_], [right]):
                yield from self._operator("compare", left, right)
            case ast.BinOp(left, _, right) if not _formats(node):
                yield from self._operator("arithmetic", left, right)
            case ast.BoolOp(_, [left, right]):
                yield from self._operator("boolean", left, right)

            case ast.If(test) | ast.IfExp(test):
                start, end = self._span(test)
                yield "negate-if", start, end, f"not ({self._text(start, end)})"

            case ast.Return(ast.Tuple([first, second])):
                yield self._swapped("swap-return", first, second)
            case ast.Return(value) if value is not None and not isinstance(value, ast.Constant):
                yield "swap-return", *self._span(value), "None"

            case ast.Constant(int(value)) if not isinstance(value, bool) and 0 <= value < 100:
                yield "off-by-one", *self._span(node), str(value + 1)

            case ast.Call(_, [first, second, *_], _) if not isinstance(first, ast.Starred | ast.Constant):
                if not isinstance(second, ast.Starred):
                    yield self._swapped("argument-order", first, second)

    def _operator(self, kind: str, left: ast.expr, right: ast.expr) -> Iterator[Edit]:
        """The operator stands between its operands, with parentheses and blanks around it."""
        _, start = self._span(left)
        end, _ = self._span(right)
        found = re.fullmatch(r"([\s)]*)(.+?)([\s(]*)", self._text(start, end))
        swapped = found and _OPERATORS[kind].get(re.sub(" +", " ", found[2]))
        if found and swapped:
            yield kind, start, end, f"{found[1]}{swapped}{found[3]}"

    def _swapped(self, kind: str, first: ast.expr, second: ast.expr) -> Edit:
        start, middle = self._span(first)
        other, end = self._span(second)
        return kind, start, end, self._text(other, end) + self._text(middle, other) + self._text(start, middle)

    def _text(self, start: int, end: int) -> str:
        return self._source[start:end].decode()

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr) and node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )


def _formats(node: ast.AST) -> bool:
    """Texts put together or formatted: a type error is no interesting bug."""
    return isinstance(node, ast.BinOp) and any(
        (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes)) or isinstance(side, ast.JoinedStr)
        for side in (node.left, node.right)
    )
