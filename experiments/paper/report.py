"""Tables, JSON and plots of the reproduced results, under experiments/results/paper/."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

FOLDER = Path(__file__).parent.parent / "results" / "paper"
DPI = 110


def save(name: str, figures: Mapping[str, Any]) -> Path:
    """One JSON file per result, numbers rounded to 5 significant digits."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(_rounded(figures), indent=1) + "\n")
    return path


def save_plot(name: str, figure: Any, folder: Path = FOLDER) -> Path:
    """A PNG without the version of matplotlib in it, so that equal figures are equal files."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.tight_layout()
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    pyplot.close(figure)
    return path


def panels(count: int, width: float = 5.0, height: float = 3.6) -> tuple[Any, list[Any]]:
    """A figure of `count` axes beside each other; sizes in inches."""
    figure, axes = pyplot.subplots(1, count, figsize=(width * count, height), squeeze=False)
    return figure, list(axes[0])


def table(rows: Iterable[Mapping[str, Any]], title: str = "") -> None:
    """Rows of equal keys as aligned columns."""
    rows = list(rows)
    if title:
        print(f"\n{title}")
    if not rows:
        return
    names = list(rows[0])
    cells = [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    print("  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True)))
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 100 else f"{value:z.2f}"
    return "-" if value is None else str(value)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
