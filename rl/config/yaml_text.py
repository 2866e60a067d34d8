"""YAML that says one thing: no key twice in a mapping, and no small text that is huge or endless as data."""

from __future__ import annotations

from typing import Any

import yaml

_MOST_VALUES = 100_000  # aliases written out
_DEEPEST = 50  # mappings and lists within each other


class YamlRefused(ValueError):
    """Valid YAML that no configuration may be; one line, with the line of the text."""


def read_yaml(text: str) -> Any:
    """Plain data. Raises YamlRefused, or yaml.YAMLError or ValueError for what is no YAML."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check(node, {})
        return loader.construct_document(node)

    except (IndexError, KeyError, AttributeError) as error:  # of a tag whose text is not of its kind
        raise YamlRefused(f"a tag such as !!int stands at what is none ({type(error).__name__})") from None
    except RecursionError:
        raise YamlRefused(f"it is nested more than {_DEEPEST} levels deep") from None
    finally:
        loader.dispose()


def _check(node: yaml.Node, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """(values, levels) of a node with its aliases written out. known: of those before; (0, 0): not ended. Raises
    YamlRefused."""
    if isinstance(node, yaml.ScalarNode):
        return 1, 0
    found = known.get(id(node))
    if found == (0, 0):
        raise YamlRefused(f"line {_line(node)}: an alias contains itself")
    if found is not None:
        return found

    known[id(node)] = (0, 0)
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        inside = [each for pair in node.value for each in pair]
    else:
        inside = node.value
    parts = [_check(each, known) for each in inside]

    values = 1 + sum(values for values, _ in parts)
    levels = 1 + max((levels for _, levels in parts), default=0)
    if values > _MOST_VALUES:
        raise YamlRefused(f"line {_line(node)}: written out, its aliases are more than {_MOST_VALUES} values")
    if levels > _DEEPEST:
        raise YamlRefused(f"line {_line(node)}: it is nested more than {_DEEPEST} levels deep")
    known[id(node)] = values, levels
    return values, levels


def _check_keys(node: yaml.MappingNode) -> None:
    """Keys that are equal as data, however they are written: `1` and `0x1`, `true` and `yes`."""
    first: dict[Any, yaml.Node] = {}
    constructor = yaml.constructor.SafeConstructor()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        is_mark = key.tag in ("tag:yaml.org,2002:merge", "tag:yaml.org,2002:value")
        before = first.setdefault((key.tag, key.value) if is_mark else constructor.construct_object(key), key)
        if before is not key:
            where = f"line {_line(key)}: the key {key.value!r} stands already in line {_line(before)}"
            raise YamlRefused(f"{where}; keep one of them")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
