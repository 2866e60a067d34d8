"""Where the value stands to which a test compares: behind a name, in literals that nothing else reads.

A test may compare to `wanted` alone. Its value then stands in a column of `parametrize`, a local, a default argument, a
constant of the module, an attribute or a fixture. Literals are found where each read of the name only compares: another
value there changes nothing but what the test expects.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Test:
    node: Function
    owners: tuple[ast.ClassDef, ...]
    """The classes around it."""
    name: str
    statements: list[ast.stmt]
    """Its body, without its docstring."""
    sides: list[ast.expr]
    """One of each equality that a passing test has compared; empty where its body is not kept."""

    # Tells pytest that this class holds no tests.
    __test__ = False

    def has_parameter(self, side: ast.expr) -> bool:
        return isinstance(side, ast.Name) and side.id in _parameters(self.node)


class Expected:
    """Of one module."""

    def __init__(self, tree: ast.Module, tests: Collection[Test]) -> None:
        self._tree = tree
        self._tests = {id(test.node) for test in tests}
        harmless = [node for test in tests for node in (test.sides or test.statements)]
        self._harmless = {id(node) for each in harmless for node in ast.walk(each)}

    def only_compared(self, side: ast.expr, within: ast.AST) -> bool:
        """Whether no read of this name does anything else."""
        return all(id(node) in self._harmless for node in _reads(within, side))

    def literals(self, test: Test, side: ast.expr) -> list[ast.expr]:
        """Which literals are the value of this side, all of them; empty where that is not certain."""
        scope: ast.AST = test.node
        match side:
            case ast.Name(name) if name in _parameters(test.node):
                found = self._of_parameter(test, name)
            case ast.Name(name) if any(_is_bound(node, name) for node in ast.walk(test.node)):
                found = _assigned(test.statements, name, scope)
            case ast.Name(name):
                scope, found = self._tree, _assigned(self._tree.body, name, self._tree)
            case ast.Attribute(ast.Name(), attr=name):
                scope, found = self._tree, self._of_attribute(name)
            case _:
                return []

        certain = self.only_compared(side, scope) and all(map(is_literal, found))
        return found if certain else []

    def _of_parameter(self, test: Test, name: str) -> list[ast.expr]:
        args = test.node.args
        given = [*args.posonlyargs, *args.args]
        defaults = dict(zip([each.arg for each in given[::-1]], args.defaults[::-1], strict=False))
        defaults |= {
            each.arg: value for each, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is not None
        }
        if name in defaults:
            return [defaults[name]]

        for holder in (test.node, *test.owners):
            columns = [column for each in holder.decorator_list for column in self._column(each, name)]
            if columns:
                return columns if self.only_compared(ast.Name(name), holder) else []
        return self._of_fixture(name)

    def _column(self, decorator: ast.expr, name: str) -> list[ast.expr]:
        """What `parametrize` gives to this parameter."""
        match decorator:
            case ast.Call(ast.Name("parametrize") | ast.Attribute(attr="parametrize"), [names, rows], keywords):
                ids = [each.value for each in keywords if each.arg == "ids"]
                if any(each.arg != "ids" for each in keywords) or not all(map(is_literal, ids)):
                    return []
            case _:
                return []

        if isinstance(rows, ast.Name) and len(list(_reads(self._tree, rows))) == 1:
            rows = next(iter(_assigned(self._tree.body, rows.id, self._tree)), rows)
        if not isinstance(rows, ast.List | ast.Tuple) or not is_literal(names):
            return []

        given = ast.literal_eval(names)
        known = [each.strip() for each in given.split(",")] if isinstance(given, str) else [*given]
        if name not in known or (len(known) == 1 and not isinstance(given, str)):
            return []
        cells = [_cells(row, len(known)) for row in rows.elts]
        return [each[known.index(name)] for each in cells] if all(cells) else []

    def _of_fixture(self, name: str) -> list[ast.expr]:
        """What the fixture of this name returns, if tests alone ask for it."""
        functions = [node for node in ast.walk(self._tree) if isinstance(node, Function)]
        if any(name in _parameters(each) and id(each) not in self._tests for each in functions):
            return []
        if not all(self.only_compared(ast.Name(name), each) for each in functions if name in _parameters(each)):
            return []

        found = [each for each in functions if each.name == name]
        values = [node.value for each in found for node in ast.walk(each) if isinstance(node, ast.Return | ast.Yield)]
        decorators = [ast.unparse(each) for node in found for each in node.decorator_list]
        is_fixture = len(found) == len(decorators) == 1 and decorators[0].split("(")[0].endswith("fixture")
        return [value for value in values if value] if is_fixture and len(values) == 1 else []

    def _of_attribute(self, name: str) -> list[ast.expr]:
        """What the one assignment to an attribute of this name gives to it, in a class or to an object."""
        classes = [node for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef)]
        of_class = [value for each in classes for value in _assigned(each.body, name, each)]
        of_objects = [
            node.value
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Assign) and any(_is_attribute(target, name) for target in node.targets)
        ]

        found = [*of_class, *of_objects]
        bindings = [node for node in ast.walk(self._tree) if _is_bound(node, name) or _is_set(node, name)]
        return found if len(found) == len(bindings) == 1 and not list(_reads(self._tree, ast.Name(name))) else []


def is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return False
    return True


def _assigned(body: Iterable[ast.stmt], name: str, scope: ast.AST) -> list[ast.expr]:
    """The value of the only assignment to this name."""
    if sum(_is_bound(node, name) for node in ast.walk(scope)) != 1:
        return []
    for statement in body:
        match statement:
            case ast.Assign([ast.Name(bound)], value) if bound == name:
                return [value]
            case ast.AnnAssign(ast.Name(bound), value=ast.expr() as value) if bound == name:
                return [value]
    return []


def _cells(row: ast.expr, count: int) -> list[ast.expr]:
    """What a row of `parametrize` gives to each parameter; empty where it does not show."""
    match row:
        case ast.Call(ast.Name("param") | ast.Attribute(attr="param"), cells):
            pass
        case ast.Tuple(cells) | ast.List(cells) if count > 1:
            pass
        case _:
            cells = [row]
    return cells if len(cells) == count else []


def _parameters(function: Function) -> set[str]:
    given = function.args
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self", "cls"}


def _reads(within: ast.AST, side: ast.expr) -> Iterator[ast.AST]:
    for node in ast.walk(within):
        match node, side:
            case (ast.Name(name, ast.Load()), ast.Name(same)) if name == same:
                yield node
            case (ast.Attribute(attr=name, ctx=ast.Load()), ast.Attribute(attr=same)) if name == same:
                yield node


def _is_bound(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Name(bound, ast.Store() | ast.Del()) | ast.arg(bound) | ast.ExceptHandler(name=bound):
            return bound == name
        case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) | ast.ClassDef(name=bound):
            return bound == name
        case ast.alias(bound, other):
            return name in (bound, other)
        case ast.Global(names) | ast.Nonlocal(names):
            return name in names
    return False


def _is_attribute(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def _is_set(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name and not isinstance(node.ctx, ast.Load)
