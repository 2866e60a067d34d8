"""What every section of the configuration is: closed, typed, with help text beside each field."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator

LARGEST = 1 << 53
"""The largest value of any number: beyond it JSON and other readers of a run would round it, and a message could not
carry it."""
LONGEST_S = 1e9
"""Thirty years: beyond that the kernel's clocks overflow."""
NO_FLAG = "a number is wanted here, not true or false"
"""What is said of `true`, which Python takes for 1."""


_MOST = {"workers": 4096, "threads": 4096, "sandboxes": 1 << 16, "sessions": 1 << 16, "_mb": 1 << 24}
"""By the end of a field's name: no machine has more, and to try would take the machine down."""


class Where(str):
    """Where a field matters, if not wherever its section does (docs/configuration.md)."""


class Section(BaseModel):
    """Numbers are of a size that can be sent and waited for; floats are finite, unless a field says otherwise."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="strings",
        allow_inf_nan=False,
    )
    where: ClassVar[str] = ""
    """Who reads the section, or when."""

    @field_validator("*", mode="before")
    @classmethod
    def _flags_are_no_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        kind = cls.model_fields[str(info.field_name)].annotation
        if value is False and "off" in get_args(kind):
            return "off"  # which YAML reads as false
        if isinstance(value, bool) and {kind, *get_args(kind)} & {int, float}:
            raise ValueError(NO_FLAG)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _numbers_have_bounds(cls, value: Any, info: ValidationInfo) -> Any:
        if value != math.inf:
            refuse_size(str(info.field_name), value)
        return value


def split_named(named: Any) -> tuple[str, dict[str, Any]]:
    """A plug-in's name and its options. Raises ValueError for what is neither form of `Named`."""
    if isinstance(named, str):
        return named, {}
    if isinstance(named, dict) and len(named) == 1:
        ((name, options),) = named.items()
        if isinstance(name, str) and isinstance(options, dict):
            return name, options
    raise ValueError("write the plug-in's name, or {name: {option: value}}")


Named = Annotated[str | dict[str, dict[str, Any]], BeforeValidator(lambda named: split_named(named) and named)]
"""A plug-in, as `name` or `{name: {option: value}}`."""


class NoOptions(Section):
    """The options of a plug-in that has none."""


def refuse_size(name: str, value: Any) -> None:
    """Raises ValueError for a number that no machine, message or clock can have."""
    if isinstance(value, int | float):
        is_time = name == "seconds" or (name.endswith("_s") and not name.endswith("_per_s"))
        of_kind = next((most for ending, most in _MOST.items() if name.endswith(ending)), LARGEST)
        most = LONGEST_S if is_time else of_kind
        if math.isnan(value) or abs(value) > most:
            raise ValueError(f"lower it: no number here is larger than {most:g}")
