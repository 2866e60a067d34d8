"""The modules of a checkout, read but never imported, and which of them import which."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FLOORS = ("algos", "rl", "rollout", "envs", "launch", "experiments")
"""The top-level folders from the ground up: each may import those before it."""

Graph = dict[str, set[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Module:
    """One file. `path` is relative to the checkout, `name` as an import statement says it."""

    path: Path
    source: str

    @property
    def name(self) -> str:
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @cached_property
    def lines(self) -> list[str]:
        return self.source.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, Function)]

    @property
    def tokens(self) -> Iterator[tokenize.TokenInfo]:
        return tokenize.generate_tokens(io.StringIO(self.source).readline)

    @property
    def comments(self) -> list[str]:
        return [token.string for token in self.tokens if token.type == tokenize.COMMENT]

    @property
    def code_lines(self) -> int:
        """Lines that are neither blank nor only a comment nor part of a docstring."""
        code = {
            line
            for token in self.tokens
            if token.type not in _LAYOUT
            for line in range(token.start[0], token.end[0] + 1)
        }

        notes = {
            line
            for node in self.nodes
            if isinstance(node, ast.Expr) and _is_text(node)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }

        return len(code - notes)

    @property
    def statements(self) -> int:
        """Logical lines, which no formatter changes."""
        return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in self.nodes)

    def folder(self, depth: int) -> str:
        """The folder that holds the module, at most `depth` names deep: `rl/core`."""
        return "/".join(self.path.parent.parts[:depth])


def _is_text(node: ast.AST) -> bool:
    """A string that stands alone: a docstring, of a module, class, function or field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def modules_of(root: Path, *folders: str) -> list[Module]:
    """All modules below these folders of the checkout; a folder may also be a single file."""
    paths = {path for folder in folders for path in [root / folder, *(root / folder).rglob("*.py")] if path.is_file()}
    return [Module(path.relative_to(root), path.read_text()) for path in sorted(paths)]


def import_graph(modules: list[Module]) -> Graph:
    """Which module imports which, everywhere in the file: inside functions and for type checking too."""
    names = {module.name for module in modules}
    graph: Graph = {}

    for module in modules:
        found: set[str] = set()
        for node in module.nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                parts = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {part if part in names else node.module for part in parts}
        graph[module.name] = found & names - {module.name}

    return graph


def folder_graph(modules: list[Module], depth: int) -> Graph:
    """The same between the folders that hold the modules, at most `depth` names deep."""
    folder = {module.name: module.folder(depth) for module in modules}
    graph: Graph = {name: set() for name in folder.values()}

    for module, targets in import_graph(modules).items():
        graph[folder[module]] |= {folder[target] for target in targets} - {folder[module]}

    return graph
