"""Recipes: files of the user's own, and those that come with Fresco, which are found from any folder."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).parents[1] / "experiments"


def find_recipe(name: str | Path) -> Path:
    """The file called `name`, else the recipe that comes with Fresco: `math_cpu` or `experiments/math_cpu.yaml`.

    A name that is neither is returned as it is; `load_config` says that it does not exist.
    """
    own = Path(name)
    shipped = SHIPPED / f"{own.name.removesuffix('.yaml')}.yaml"
    is_shipped = own.parent.name in ("", SHIPPED.name) and not own.is_absolute() and shipped.exists()
    return shipped if is_shipped and not own.is_file() else own
