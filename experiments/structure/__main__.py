"""Figures of the code, beside those of another checkout, and the picture of its imports.

    python -m experiments.structure [PATH] [--against OLD_CHECKOUT]
    python -m experiments.structure --picture docs/architecture/imports.svg

Prints Markdown. Compared as "the same code" is what the system runs on: `algos`, `rl`, `rollout` without the
simulator, `launch` and the server of environments.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from experiments.structure.figures import Figures, by_folder, figures
from experiments.structure.picture import draw
from experiments.structure.synchronisations import synchronisations

Row = list[str]
_READS = "tensors that the host reads within a pack, forward and backward, two layers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", default=Path("."), help="the checkout")
    parser.add_argument("--against", type=Path, help="a checkout from before")
    parser.add_argument("--picture", type=Path, help="an .svg, .png or .pdf to draw the imports in")
    arguments = parser.parse_args()

    if arguments.picture:
        draw(arguments.path, arguments.picture)
        return

    roots = [arguments.against, arguments.path] if arguments.against else [arguments.path]
    print(markdown(figure_rows([figures(root) | {_READS: synchronisations(root)} for root in roots])))
    print()
    print(markdown(folder_rows([by_folder(root) for root in roots])))


def figure_rows(columns: list[Figures]) -> list[Row]:
    """One row for each figure, with the change in percent where there are two checkouts."""
    heading = ["figure", "before", "now", "change"] if len(columns) == 2 else ["figure", "now"]
    rows = [heading]

    for title, now in columns[-1].items():
        values = [column[title] for column in columns]
        row = [title, *(number(value) for value in values)]
        if len(values) == 2:
            row.append(f"{100 * (now / values[0] - 1):+z.1f} %" if values[0] else "")
        rows.append(row)

    return rows


def folder_rows(columns: list[dict[str, tuple[int, int]]]) -> list[Row]:
    """Lines and code lines of each folder that one of the checkouts has."""
    times = ["before: ", "now: "] if len(columns) == 2 else [""]
    rows = [["folder", *(time + kind for time in times for kind in ("lines", "code lines"))]]

    for folder in sorted(set().union(*columns)):
        counts = [column.get(folder, (0, 0)) for column in columns]
        rows.append([folder, *(number(value) if value else "" for pair in counts for value in pair)])

    return rows


def number(value: float) -> str:
    """The number as text: whole numbers in groups of three digits, others with one decimal."""
    return f"{value:.1f}" if isinstance(value, float) else f"{value:,}".replace(",", " ")


def markdown(rows: list[Row]) -> str:
    """The rows as a table; the first one is its heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    heading, *others = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    rule = ["-" * width for width in widths]

    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heading, rule, *others])


if __name__ == "__main__":
    main()
