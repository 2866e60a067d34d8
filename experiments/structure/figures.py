"""What is counted. Each figure of one checkout is one number, or a number for each folder."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx

from experiments.structure import prose
from experiments.structure.checkout import FLOORS, Function, Graph, Module, folder_graph, modules_of

LONG_FUNCTION = 20
"""Lines from which a function needs blank lines between its steps."""
LONGEST_RUN = 12
"""Lines that may follow each other without a blank one."""
LONGEST_FILE = 600
LONGEST_FUNCTION = 60

COMPARED = ("algos", "rl", "rollout", "launch", "envs/server.py", "envs/base.py")
"""The code whose amount is compared. `envs/base.py` is the protocol of environments, now in `rollout/episodes`."""
NOT_COMPARED = "rollout/simulate"
"""The simulator stood in `experiments` before."""

Figures = dict[str, float]


def figures(root: Path) -> Figures:
    """Every figure of the checkout at `root`, by its title."""
    source = modules_of(root, *FLOORS)
    tests = modules_of(root, "tests")
    lines = sum(len(module.lines) for module in source)

    long_functions = sum(is_long(function) for module in source for function in module.functions)
    airless = sum(len(airless_functions(module)) for module in source)
    top = folder_graph(source, 1)
    nested = folder_graph(source, 4)

    return {
        "the same code: code lines": sum(module.code_lines for module in compared(root)),
        "the same code: logical lines": sum(module.statements for module in compared(root)),
        "source: lines": lines,
        "source: code lines": sum(module.code_lines for module in source),
        "source: modules": len(source),
        "tests: code lines": sum(module.code_lines for module in tests),
        f"functions longer than {LONG_FUNCTION} lines": long_functions,
        "… without any blank line between steps": airless,
        "… their share in %": 100 * airless / max(1, long_functions),
        f"runs of more than {LONGEST_RUN} lines without a blank one": sum(len(long_runs(m)) for m in source),
        "tuple assignments in 1000 lines": 1000 * sum(map(tuple_assignments, source)) / max(1, lines),
        "`fmt: skip` in source": sum(map(format_skips, source)),
        "`fmt: skip` in source and tests": sum(map(format_skips, source + tests)),
        "files that name `logp_behavior`": files_that_name("logp_behavior", source),
        "files that name `policy_version`": files_that_name("policy_version", source),
        "fields of the configuration": configuration_fields(source),
        "defaults of the configuration that stand twice": len(repeated_defaults(source)),
        f"files over {LONGEST_FILE} lines": sum(len(module.lines) > LONGEST_FILE for module in source),
        f"functions over {LONGEST_FUNCTION} lines": sum(
            length(function) > LONGEST_FUNCTION for module in source for function in module.functions
        ),
        "arrows between top-level folders": arrows(top),
        "… that point up": len(upward(top)),
        "arrows between all folders": arrows(nested),
        "… that lie on a circle": on_a_circle(nested),
    } | prose_figures(root)


def prose_figures(root: Path) -> Figures:
    """How much there is to read in the docs, and how heavy it is."""
    pages = [path.read_text() for path in sorted((root / "docs").glob("*.md"))]
    texts = [prose.read(page) for page in pages]
    cells = [prose.words(cell) for text in texts for cell in text.cells]
    paragraphs = [paragraph for text in texts for paragraph in text.paragraphs]
    lengths = [prose.words(each) for paragraph in paragraphs for each in prose.sentences(paragraph)]

    return {
        "docs: words": sum(len(page.split()) for page in pages),
        "docs: words of the longest table cell": max(cells, default=0),
        "docs: words of the mean sentence": sum(lengths) / max(1, len(lengths)),
        f"docs: sentences of more than {prose.LONGEST_SENTENCE} words": sum(
            length > prose.LONGEST_SENTENCE for length in lengths
        ),
    }


def compared(root: Path) -> list[Module]:
    """The modules of the code whose amount is compared."""
    modules = modules_of(root, *COMPARED)

    return [module for module in modules if module.folder(2) != NOT_COMPARED]


def by_folder(root: Path) -> dict[str, tuple[int, int]]:
    """(lines, code lines) of every folder, two names deep; what lies directly in `rl` is `rl/*`."""
    lines: Counter[str] = Counter()
    code: Counter[str] = Counter()

    for module in modules_of(root, *FLOORS, "tests"):
        name = module.folder(2)
        name = name if "/" in name else f"{name}/*"
        lines[name] += len(module.lines)
        code[name] += module.code_lines

    return {name: (lines[name], code[name]) for name in sorted(lines)}


def length(function: Function) -> int:
    """Lines from `def` to the end."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def is_long(function: Function) -> bool:
    """Whether it needs blank lines between its steps."""
    return length(function) > LONG_FUNCTION


def steps(function: Function) -> list[ast.stmt]:
    """The body without the docstring."""
    return function.body[ast.get_docstring(function) is not None :]


def airless_functions(module: Module) -> list[str]:
    """Long functions of several steps without one blank line between them."""
    found = []

    for function in filter(is_long, module.functions):
        body = steps(function)
        within = module.lines[body[0].lineno - 1 : body[-1].end_lineno] if body else []
        one_step = len(body) == 1 and not hasattr(body[0], "body")
        if within and not one_step and all(line.strip() for line in within):
            found.append(f"{module.path}:{function.lineno} {function.name}")

    return found


def long_runs(module: Module) -> list[str]:
    """Where a function goes on for too long without a blank line; one long simple statement may."""
    exempt = {
        line
        for node in module.nodes
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and not isinstance(node, ast.Match)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if (node.end_lineno or node.lineno) - node.lineno >= LONGEST_RUN
    }

    found: dict[int, str] = {}

    for function in module.functions:
        body = steps(function)
        run = 0
        for line in range(body[0].lineno, (function.end_lineno or 0) + 1) if body else ():
            run = 0 if line in exempt or not module.lines[line - 1].strip() else run + 1
            if run == LONGEST_RUN + 1:
                found[line] = f"{module.path}:{line} in {function.name}"

    return list(found.values())


def tuple_assignments(module: Module) -> int:
    """`a, b = 1, 2`; what exchanges values (`a, b = b, a` or `taken, a = a, None`) is not one."""
    count = 0

    for node in module.nodes:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Tuple)
            and isinstance(node.value, ast.Tuple)
        ):
            names = set(map(ast.unparse, node.targets[0].elts))
            count += names.isdisjoint(map(ast.unparse, node.value.elts))

    return count


def format_skips(module: Module) -> int:
    """Comments that keep the formatter off."""
    return sum(re.search(r"fmt: *(skip|off)", comment) is not None for comment in module.comments)


def files_that_name(word: str, modules: list[Module]) -> int:
    """Files in which the word stands, in code or beside it."""
    return sum(re.search(rf"\b{word}\b", module.source) is not None for module in modules)


def repeated_defaults(modules: list[Module]) -> list[str]:
    """Fields of a class that has two or more in common, name and default, with one section of the configuration."""
    classes = [(module, node) for module in modules for node in module.nodes if isinstance(node, ast.ClassDef)]
    sections = [set(field_defaults(node)) for _, node in classes if is_section(node)]
    found = []

    for module, node in classes:
        if not is_section(node):
            shared = [common for section in sections if len(common := section & set(field_defaults(node))) > 1]
            found += [f"{module.path}: {node.name}.{name} = {value}" for name, value in sorted(set().union(*shared))]

    return found


def configuration_fields(modules: list[Module]) -> int:
    """Fields of `Config` and of all sections in it, a section counting as one field of its own."""
    classes = {node.name: node for module in modules for node in module.nodes if isinstance(node, ast.ClassDef)}
    sections = {name: node for name, node in classes.items() if is_section(node)}

    def count(section: ast.ClassDef) -> int:
        fields = [node for node in section.body if isinstance(node, ast.AnnAssign)]
        named = [re.findall(r"\w+", ast.unparse(field.annotation)) for field in fields]
        return len(fields) + sum(count(sections[name]) for names in named for name in names if name in sections)

    return count(sections["Config"]) if "Config" in sections else 0


def is_section(node: ast.ClassDef) -> bool:
    """Whether the class is a section of the configuration."""
    return any(ast.unparse(base) == "Section" for base in node.bases)


def field_defaults(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """(name, default) of the annotated fields; of `Field(3, ge=0)` the 3."""
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and field.value is not None:
            value = field.value
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field" and value.args:
                value = value.args[0]
            yield ast.unparse(field.target), ast.unparse(value)


def arrows(graph: Graph) -> int:
    """Pairs of folders of which one imports the other."""
    return sum(len(targets) for targets in graph.values())


def upward(graph: Graph) -> list[str]:
    """Arrows between top-level folders that do not point down."""
    return [
        f"{folder} imports {target}"
        for folder, targets in graph.items()
        for target in targets
        if FLOORS.index(target) >= FLOORS.index(folder)
    ]


def on_a_circle(graph: Graph) -> int:
    """Arrows between folders that import each other, directly or by a longer way."""
    components = networkx.strongly_connected_components(networkx.DiGraph(graph))

    return sum(len(graph[folder] & component) for component in components for folder in component)
