"""The picture of the folders and their imports, drawn by graphviz (`dot`, of the Debian package `graphviz`).

A band is a top-level folder, a box a folder in it with its modules, an arrow goes to what is imported. An arrow that
a longer way round implies is left out: whatever can be reached along arrows may be imported.
"""

from __future__ import annotations

import subprocess
import textwrap
from itertools import pairwise
from pathlib import Path

import networkx

from experiments.structure.checkout import FLOORS, Module, folder_graph, modules_of

FILL = ("#dbe9f6", "#d9f0e3", "#fdf1cf", "#fde2d5", "#eadff3", "#ececec")
INK = ("#2f6ea5", "#2b8a57", "#a87c00", "#c0552b", "#7b4ea3", "#5f5f5f")
"""The colours of each floor's band, and of the arrows that leave it."""
STYLE = """
    graph [rankdir=TB, newrank=true, nodesep=0.22, ranksep=0.42, pad=0.2, fontname="Helvetica-Bold", fontsize=17]
    node [shape=box, style="filled,rounded", fillcolor=white, fontname="Helvetica", fontsize=11, margin="0.14,0.08"]
    edge [arrowsize=0.65, penwidth=1.3]
"""
STRAIGHT = "style=invis, weight=1000"
LABEL_WIDTH = 44
"""Characters in one line of a box."""


def draw(root: Path, picture: Path) -> None:
    """Draw the imports of the checkout at `root`; the ending of `picture` says in what format.

    Raises FileNotFoundError without graphviz, and CalledProcessError when it refuses.
    """
    picture.parent.mkdir(parents=True, exist_ok=True)
    text = dot_text(modules_of(root, *FLOORS))

    subprocess.run(["dot", f"-T{picture.suffix[1:]}", "-o", picture], input=text, text=True, check=True)


def dot_text(modules: list[Module]) -> str:
    """The picture in graphviz's language. Raises NetworkXError when imports between folders form a circle."""
    modules = [module for module in modules if module.lines]
    graph = folder_graph(modules, 2)
    lines = [STYLE]

    for floor, fill, ink in zip(FLOORS, FILL, INK, strict=True):
        folders = sorted(folder for folder in graph if folder.split("/")[0] == floor)
        lines.append(f'subgraph "cluster {floor}" {{')
        lines.append(f'label="{floor}"; labeljust=l; style="filled,rounded"; color="{fill}"; fontcolor="{ink}"')
        lines += [box(folder, modules, ink) for folder in folders]
        lines += spine(floor, folders)
        lines.append("}")

    for folder, target in networkx.transitive_reduction(networkx.DiGraph(graph)).edges:
        ink = INK[FLOORS.index(folder.split("/")[0])]
        lines.append(f'"{folder}" -> "{target}" [color="{ink}"]')

    lines += [f'"{upper} end" -> "{lower} begin" [{STRAIGHT}]' for lower, upper in pairwise(FLOORS)]

    return "digraph imports {\n" + "\n".join(lines) + "\n}\n"


def spine(floor: str, folders: list[str]) -> list[str]:
    """Two invisible points, with all folders of the floor between them: they stack the floors on one line."""
    points = [f'"{floor} {end}" [style=invis, shape=point, width=0]' for end in ("begin", "end")]
    between = [
        f'"{above}" -> "{below}" [style=invis, weight=0, minlen=0]'
        for folder in folders
        for above, below in ((f"{floor} begin", folder), (folder, f"{floor} end"))
    ]

    return [*points, f'"{floor} begin" -> "{floor} end" [{STRAIGHT}, minlen=0]', *between]


def box(folder: str, modules: list[Module], ink: str) -> str:
    """A folder's name and the modules below it."""
    inside = [module for module in modules if module.folder(2) == folder]
    parts = {module.path.relative_to(folder).parts[0].removesuffix(".py").strip("_") for module in inside}
    names = textwrap.wrap(", ".join(sorted(parts - {"init", "main"})), LABEL_WIDTH)
    label = "<br/>".join([f'<b><font point-size="13">{folder}</font></b>', *names])

    return f'"{folder}" [label=<{label}>, color="{ink}"]'
