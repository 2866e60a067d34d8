"""The page of every field: `python -m experiments.configuration > docs/configuration.md`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic.fields import FieldInfo

from rl.config.schema import Config
from rl.config.section import Section, Where
from rl.learner.simulated import SimulatedOptions as SimulatedLearner
from rl.observe.alarms import ALARMS
from rollout.generator.engines.environment import VllmOptions
from rollout.generator.engines.timing import SimulatedOptions as SimulatedEngine

HEAD = """# Configuration

Every field of a run, made from the code by `python -m experiments.configuration > docs/configuration.md`. A recipe is a
YAML file with these sections; `fresco run RECIPE section.field=value` sets one field. Unknown names are refused.
"""
PLUG_INS = """## Options of plug-ins

Environments say theirs in [environments.md](environments.md), losses in [losses.md](losses.md), advantages in
[advantages.md](advantages.md).
"""
LIMITS = """## Limits of alarms

`alarms.limits.NAME.LIMIT=value` sets one, as `alarms.limits.large-steps.kl=0.02` does. What each alarm watches, and
what to change, is in [alarms.yaml](../rl/observe/alarms.yaml).
"""
_COLUMNS = ("field", "type", "default", "what it says", "where it matters")
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


def page() -> str:
    """The whole page, as Markdown."""
    parts = [HEAD, *(_section(title, section) for title, section in sections(Config))]
    options: dict[str, type[Section]] = {"generator.options (vllm)": VllmOptions}
    options["generator.options (simulated)"] = SimulatedEngine
    options["learner.options (simulated)"] = SimulatedLearner
    parts += [PLUG_INS, *(_section(title, each).replace("## ", "### ", 1) for title, each in options.items())]
    return "\n".join([*parts, LIMITS, _limits()])


def sections(section: type[Section], title: str = "") -> Iterator[tuple[str, type[Section]]]:
    """The sections by dotted name, each followed by those in it; the outermost has none."""
    yield title, section
    for name, field in section.model_fields.items():
        for inner in inner_sections(field):
            yield from sections(inner, f"{title}.{name}" if title else name)


def inner_sections(field: FieldInfo) -> list[type[Section]]:
    """The section that a field is, or a list of which it is."""
    kinds = (field.annotation, *get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]


def _section(title: str, section: type[Section]) -> str:
    schemas = section.model_json_schema()["properties"]
    rows = []
    for name, field in section.model_fields.items():
        if field.description:
            said = " ".join(field.description.split())
            rows.append((f"`{name}`", _type(schemas[name]), _default(field), said, _where(section, field)))
    return f"## {title or 'The run itself'}\n\n{_table(_COLUMNS, rows)}\n"


def _type(schema: dict[str, Any]) -> str:
    """The type in words: `number ≥ 0`, the choices, or `text or null`."""
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))

    bounds = [f"{sign} {_number(schema[word])}" for word, sign in _BOUNDS.items() if word in schema]
    return " ".join([_WORDS[schema["type"]], *bounds])


def _number(value: float) -> str:
    """The number as text: whole numbers are whole, others short."""
    return str(value) if isinstance(value, int) else f"{value:g}"


def _default(field: FieldInfo) -> str:
    """The default as YAML has it."""
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return f"`{words[value]}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def _where(section: type[Section], field: FieldInfo) -> str:
    return next((str(each) for each in field.metadata if isinstance(each, Where)), section.where)


def _limits() -> str:
    rows = [
        (f"`{name}.{each}`", f"`{own.value:g}`", f"{own.least:g} to {own.most:g}", own.meaning)
        for name, alarm in ALARMS.items()
        for each, own in alarm.limits.items()
    ]
    return _table(("limit", "value", "range", "what it says"), rows).replace(" to 9.0072e+15", " and above")


def _table(heading: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heading, ("---",) * len(heading), *(tuple(cell.replace("|", "&#124;") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(page())
