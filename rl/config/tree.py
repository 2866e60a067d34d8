"""The tree of values that a recipe and its overrides make, before it is checked against the types."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rl.config.recipes import SHIPPED, find_recipe, recipe_places
from rl.config.yaml_text import YamlRefused, read_yaml


class ConfigError(ValueError):
    """Bad configuration: one line naming the field, the value and the fix."""


TINY = "tiny"
"""The model that is made here, and the one of a recipe that names none."""
OPTIONS_OF = {
    "model.path": "model.warm_start",
    "env.name": "env.options",
    "algo.loss": "algo.options",
    "algo.advantage": "algo.advantage",  # they stand with its name
    "rollout.curriculum": "rollout.curriculum",
    "generator.engine": "generator.options",
    "learner.kind": "learner.options",
}
"""Where a plug-in's options are, by the field that names it. Another plug-in does not inherit them, nor does another
model a warm start: it is trained only where that is said with its name."""
UNNAMED = {
    "model.path": TINY,
    "env.name": "math",
    "algo.loss": "grpo",
    "generator.engine": "vllm",
    "learner.kind": "fsdp",
}
"""Whose options they are where a recipe names none: the defaults of these fields."""


def removed_fields() -> dict[str, str]:
    """Fields of earlier versions, by their dotted names: what to write instead."""
    told: dict[str, str] = yaml.safe_load(Path(__file__).with_name("removed.yaml").read_text())
    return told


def nearest(key: str, valid: list[str]) -> str:
    """The end of an error message: the nearest valid name, or all of them."""
    if not valid:
        return "; there are none here"
    close = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(valid)) or 'none'}"


def first_fault(error: ValidationError, given: Any, where: str = "") -> str:
    """The dotted field, its value and what is wrong with it. Pydantic puts its own words for a key and for each member
    of a union into the place; here they are left out, and a union's members are told together."""
    told: dict[str, str] = {}
    values: dict[str, Any] = {}

    for each in error.errors():
        place = [where] if where else []
        found = given
        for part in each["loc"]:
            inside = part in (
                found if isinstance(found, Mapping) else range(len(found) if isinstance(found, list) else 0)
            )
            if inside or (each["type"] == "missing" and part is each["loc"][-1]):
                place.append(str(part))
            found = found[part] if inside else found

        name = ".".join(place) if each["loc"] else ""
        reason = each["msg"].removeprefix("Value error, ")
        values.setdefault(name, each["input"])
        told[name] = f"{told[name]}, or {reason.removeprefix('Input should be ')}" if name in told else reason

    field, reason = next(iter(told.items()))
    return f"{field}={values[field]!r}: {reason}" if field else reason


def read_recipe(name: str | Path, folder: Path = Path(), extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tree of a YAML file over that of its `base`. It is looked for in `folder`, and among the recipes that come
    with Fresco. Raises ConfigError."""
    path = find_recipe(name, folder)
    try:
        tree = read_yaml(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise ConfigError(_not_found(name, folder, extended_by)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {str(path)!r} cannot be read: {error}; it must be a YAML file") from None
    except YamlRefused as error:
        raise ConfigError(f"recipe {str(path)!r}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"recipe {str(path)!r} is not valid YAML: {_first_fault(error)}") from None

    if not isinstance(tree, dict):
        raise ConfigError(f"recipe {str(path)!r} must be a mapping of sections")
    base = tree.pop("base", None)
    tree = {key: _beside(path.absolute().parent, value) for key, value in tree.items()}
    if not base:
        return tree

    if path.resolve() in extended_by:
        raise ConfigError(f"recipe {str(path)!r}: base={base!r} leads back to this recipe")
    if not isinstance(base, str):
        raise ConfigError(f"recipe {str(path)!r}: base={base!r} must be the name or the path of another recipe")
    low = read_recipe(base, path.parent, (*extended_by, path.resolve()))
    for name in OPTIONS_OF:
        forget_options(low, name, _value(tree, name))
    return _merge(low, tree)


def _not_found(name: str | Path, folder: Path, extended_by: tuple[Path, ...]) -> str:
    places = recipe_places(name, folder)
    looked = " nor ".join(str(place.absolute()) for place in places)
    named = Path(name)
    here = {path.stem: str(named.with_name(path.name)) for path in places[0].parent.glob("*.yaml")}
    shipped = {path.stem: path.stem for path in SHIPPED.glob("*.yaml")}
    of = f"{str(extended_by[-1])!r}: base=" if extended_by else ""

    wanted = named.name.partition(".")[0]
    if close := difflib.get_close_matches(wanted, shipped | here, n=1, cutoff=0.5):
        hint = f"; did you mean {(shipped | here)[close[0]]!r}?"
    else:
        looked_in = here | (shipped if SHIPPED in [place.parent for place in places] else {})
        hint = nearest("", sorted(looked_in.values()))
    return f"recipe {of}{str(name)!r} does not exist: there is no {looked}{hint}"


def _first_fault(error: Exception) -> str:
    """What a parser found first, in one line, with the line of the text."""
    mark = getattr(error, "problem_mark", None)
    return f"line {mark.line + 1}: {error.problem}" if mark else str(error).splitlines()[0]  # type: ignore[attr-defined]


def _beside(folder: Path, value: Any) -> Any:
    """The values of a recipe in `folder`: a text that begins with `./` or `../` names what stands there, wherever
    Fresco is started."""
    if isinstance(value, str) and value.startswith(("./", "../")):
        return os.path.normpath(folder / value)
    if isinstance(value, list):
        return [_beside(folder, each) for each in value]
    if isinstance(value, dict):
        return {_beside(folder, key): _beside(folder, each) for key, each in value.items()}
    return value


def forget_options(tree: dict[str, Any], name: str, value: Any) -> None:
    """Drop the options of the plug-in that `name` names in the tree, where `value` names another one."""
    before = _value(tree, name) or UNNAMED.get(name)
    section, _, options = OPTIONS_OF[name].partition(".")
    if value is not None and before not in (None, value) and isinstance(tree.get(section), dict):
        tree[section].pop(options, None)


def _value(tree: dict[str, Any], name: str) -> Any:
    section, _, field = name.partition(".")
    values = tree.get(section)
    return values.get(field) if isinstance(values, dict) else None


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs, by name, with both values; None stands for one that is not there."""
    names = dict.fromkeys([*one, *other])
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def _merge(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def apply_override(tree: dict[str, Any], item: str) -> None:
    """Set what `section.key=value` says in a tree of sections. Raises ConfigError."""
    key, separator, text = item.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {item!r} is not of the form key=value")

    try:
        value = read_yaml(text) if text else ""  # YAML reads nothing as null
    except YamlRefused as error:
        raise ConfigError(f"override {item!r:.200}: {error}") from None
    except (yaml.YAMLError, ValueError):
        value = text
    if isinstance(value, str):  # YAML reads 1e-4 as a string
        try:
            value = float(value)
        except ValueError:
            pass

    *parents, leaf = key.split(".")
    if "" in (*parents, leaf):
        raise ConfigError(f"override {item!r}: {key!r} is no name of a field (section.field)")
    node = tree
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {item!r}: {parent!r} is a value, not a section")
    node[leaf] = value
