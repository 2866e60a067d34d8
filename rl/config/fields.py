"""The fields of the configuration in words: name, type, default, what it says, where it matters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rl.config.section import Section, Where

_BOUNDS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "multipleOf": "multiple of",
}
_WORDS = {
    "array": "list",
    "boolean": "true or false",
    "integer": "whole number",
    "null": "null",
    "number": "number",
    "object": "mapping",
    "string": "text",
}


@dataclass(frozen=True)
class Described:
    """One field; type and default as YAML has them, with choices and default between backquotes."""

    name: str
    type: str
    default: str
    says: str
    where: str


def sections(section: type[Section], title: str = "") -> Iterator[tuple[str, type[Section]]]:
    """The sections by dotted name, each followed by those in it; the outermost has none."""
    yield title, section
    for name, field in section.model_fields.items():
        for inner in inner_sections(field):
            yield from sections(inner, f"{title}.{name}" if title else name)


def inner_sections(field: FieldInfo) -> list[type[Section]]:
    """The section that a field is, where it is one."""
    kinds = (field.annotation, *get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def described(model: type[BaseModel]) -> Iterator[Described]:
    """The fields of a section, or of a plug-in's options, that say what they are."""
    schemas = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        if field.description:
            says = " ".join(field.description.split())
            yield Described(name, _type(schemas[name]), _default(field), says, _where(model, field))


def _type(schema: dict[str, Any]) -> str:
    """The type in words: `number ≥ 0`, the choices, or `text or null`."""
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))

    bounds = [f"{sign} {_number(schema[word])}" for word, sign in _BOUNDS.items() if word in schema]
    return " ".join([_WORDS[schema.get("type", "object")], *bounds])


def _number(value: float) -> str:
    """The number as text: whole numbers are whole, others short."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return f"`{words[value]}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _where(model: type[BaseModel], field: FieldInfo) -> str:
    return next((str(each) for each in field.metadata if isinstance(each, Where)), getattr(model, "where", ""))
