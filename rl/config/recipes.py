"""Recipes: files of the user's own, and those that come with Fresco, which are found from any folder."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).parents[2] / "experiments"


def find_recipe(name: str | Path, folder: Path = Path()) -> Path:
    """The file called `name` in `folder`, else the recipe that comes with Fresco (`math_cpu` or
    `experiments/math_cpu.yaml`), else the file with `.yaml` behind its name.

    A name that is none of them is returned as it is; `load_config` says where it was looked for.
    """
    places = recipe_places(name, folder)
    return next((place for place in places if place.is_file()), places[0])


def recipe_places(name: str | Path, folder: Path) -> list[Path]:
    """Where a recipe of this name is looked for, in order."""
    named = Path(name)
    own = folder / named
    places = [own]
    if named.parent.name in ("", SHIPPED.name) and not named.is_absolute():
        places.append(SHIPPED / f"{own.name.removesuffix('.yaml')}.yaml")
    if not own.name.endswith((".yaml", ".yml")):
        places.append(own.with_name(f"{own.name}.yaml"))
    return places
